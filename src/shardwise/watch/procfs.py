"""What the kernel says of a process: its state, the time it has used, and whether memory ran out."""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path

_KILLED = re.compile(r"Killed process (\d+)")


def state_of(pid: int) -> str:
    """R running, S sleeping, D in disk wait, T stopped by a signal, Z ended; empty: gone."""
    fields = _stat(pid)
    return fields[0] if fields else ""


def is_same_process(pid: int, when: float) -> bool:
    """Whether the process of this number was there at that time already, by the wall clock."""
    age = age_of(pid)
    return age is not None and time.time() - age <= when + CLOCK_MAY_JUMP


def age_of(pid: int) -> float | None:
    """In seconds; None where it is gone, or the kernel is not Linux."""
    fields = _stat(pid)
    if not fields:
        return None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


CLOCK_MAY_JUMP = 60.0
"""Seconds by which the wall clock may have been set back meanwhile."""


def cpu_seconds(pid: int) -> float:
    """Of a process and of its children, those that have ended included."""
    total = 0.0
    for each in [pid, *children_of(pid)]:
        if fields := _stat(each):
            total += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return total


def children_of(pid: int) -> list[int]:
    """All processes below one, however deep."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += [int(word) for word in (task / "children").read_text().split()]
    return found + [below for each in found for below in children_of(each)]


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name, which may itself hold spaces and brackets."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


class MemoryWord:
    """The kernel's word on processes that it killed because memory ran out, since this was made."""

    def __init__(self) -> None:
        self._counters = [file for file in _oom_files() if _count(file) is not None]
        self._before = {file: _count(file) for file in self._counters}
        self._log = _open_log()
        self._named: dict[int, str] = {}

    def on(self, pid: int) -> str | None:
        """How the kernel says that it killed this process; None: it says nothing."""
        self._read_log()
        if pid in self._named:
            return f"the kernel's log: {self._named[pid]}"
        for file in self._counters:
            before, now = self._before[file] or 0, _count(file) or 0
            if now > before:
                self._before[file] = now  # the next kill needs a word of its own
                return f"{file} counts {now - before} more"
        return None

    def _read_log(self) -> None:
        if self._log is None:
            return
        while True:
            try:
                line = os.read(self._log, 8192).decode(errors="replace")
            except BrokenPipeError:  # lines were overwritten before they were read: go on with the next
                continue
            except OSError:
                return
            if not line:
                return
            text = line.partition(";")[2].splitlines()[0] if ";" in line else line
            if match := _KILLED.search(text):
                self._named[int(match[1])] = text[:200]


def _oom_files() -> list[Path]:
    """The counters of this process's control group, of version 2 and of version 1."""
    files: list[Path] = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                for root in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified"):
                    files += [Path(f"{root}{path}/memory.events"), Path(f"{root}/memory.events")]
            elif "memory" in controllers.split(","):
                root = "/sys/fs/cgroup/memory"
                files += [Path(f"{root}{path}/memory.oom_control"), Path(f"{root}/memory.oom_control")]
    return list(dict.fromkeys(files))


def _count(file: Path) -> int | None:
    try:
        return next(
            (int(line.split()[1]) for line in file.read_text().splitlines() if line.startswith("oom_kill ")), None
        )
    except (OSError, ValueError, IndexError):
        return None


def _open_log() -> int | None:
    try:
        log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
        os.lseek(log, 0, os.SEEK_END)
    except OSError:
        return None
    return log
