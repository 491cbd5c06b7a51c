"""How figures and names are written in a report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def figure(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"


def within(name: str) -> str:
    return f" in {name}" if name else ""


def module_of(parameter: str) -> str:
    module, _, leaf = parameter.rpartition(".")
    return f"module {module}, parameter {leaf} ({parameter})" if module else f"parameter {leaf}"


def listed(names: Sequence[Any]) -> str:
    shown = ", ".join(str(name) for name in names[:4])
    return shown + (f" and {len(names) - 4} more" if len(names) > 4 else "")
