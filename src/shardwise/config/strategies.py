"""The names of the strategies: those of the files in parallel/strategies/, and those that other packages bring.

Without torch: to read a file must be quick. What a strategy does is in its own file.
"""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

ALONE, TOGETHER = "single", "ddp"
"""What is taken on one device and on several, where the config asks for nothing else."""
GROUP = "shardwise.strategies"
"""Of entry points: a name, and the class behind it."""


@cache
def built_in() -> tuple[str, ...]:
    folder = Path(__file__).parent.parent / "parallel" / "strategies"
    return tuple(sorted(module.name for module in pkgutil.iter_modules([str(folder)])))


def selecting_blocks() -> set[str]:
    """Blocks of `training` that choose a strategy by being there. The ddp block holds settings only."""
    return set(built_in()) - {TOGETHER}


@cache
def plugins() -> dict[str, EntryPoint]:
    return {each.name: each for each in entry_points(group=GROUP)}
