"""How much memory this process may still take."""

from __future__ import annotations

import contextlib
from pathlib import Path


def host_memory() -> tuple[int, int]:
    """Bytes available and in all: of the machine, or of the container that this process is confined to."""
    known: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, value = line.split(":")
            known[name] = int(value.split()[0]) * 1024
    available, total = known.get("MemAvailable", 0), known.get("MemTotal", 0)
    with contextlib.suppress(OSError, ValueError):  # "max": not confined
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        if limit < total:
            available, total = min(available, max(0, limit - used)), limit
    return available, total
