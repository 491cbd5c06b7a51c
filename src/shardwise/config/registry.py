"""What a config calls by name: one line for each task and tracker that comes with shardwise, one file for each strategy and
optimizer; other packages add theirs by entry points of the same groups. Nothing is imported before its name is used."""

from __future__ import annotations

import difflib
import pkgutil
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from shardwise.errors import ShardwiseError, one_line

Group = Literal[
    "shardwise.tasks", "shardwise.strategies", "shardwise.optimizers", "shardwise.launchers", "shardwise.trackers"
]

ALONE, TOGETHER = "single", "ddp"
"""The strategies on one device and on several, where the config asks for nothing else."""


def _files(folder: str, *, besides: tuple[str, ...] = ()) -> dict[str, str]:
    """Each module of a folder by its name."""
    names = [module.name for module in pkgutil.iter_modules([str(Path(__file__).parent.parent / folder)])]
    return {name: f"shardwise.{folder.replace('/', '.')}.{name}" for name in names if name not in besides}


BUILT_IN: dict[Group, dict[str, str]] = {
    "shardwise.tasks": {
        "chess": "shardwise.tasks.chess.task:ChessTask",
        "cells": "shardwise.tasks.cells.task:CellsTask",
        "segmentation": "shardwise.tasks.segmentation.task:SegmentationTask",
        "images": "shardwise.tasks.images.task:ImagesTask",
    },
    "shardwise.strategies": _files("parallel/strategies"),
    "shardwise.optimizers": _files("optimizers", besides=("rule",)),
    "shardwise.launchers": _files("launch/clusters"),
    "shardwise.trackers": {
        "tensorboard": "shardwise.watch.trackers.tensorboard:TensorBoard",
        "wandb": "shardwise.watch.trackers.wandb:WeightsAndBiases",
        "mlflow": "shardwise.watch.trackers.mlflow:MLflow",
    },
}


def selecting_blocks() -> set[str]:
    """Blocks of `training` that choose a strategy by being there. The ddp block holds settings only."""
    return set(BUILT_IN["shardwise.strategies"]) - {TOGETHER}


def lookup(group: Group, name: str) -> EntryPoint | None:
    """What the name stands for. A name that comes with shardwise cannot be taken by another package."""
    built_in = BUILT_IN.get(group, {})
    return EntryPoint(name, built_in[name], group) if name in built_in else found(group).get(name)


def found(group: Group) -> dict[str, EntryPoint]:
    """What the installed packages add. Reads the metadata of all of them: asked only for a name that is not built in."""
    entries: dict[str, EntryPoint] = {}
    for entry in entry_points(group=group):
        if entry.name in entries:
            both = f"{_package(entries[entry.name])} and {_package(entry)}"
            raise ShardwiseError(f"{entry.name!r} of {group} is in two packages: {both}. Uninstall one of them")
        entries[entry.name] = entry
    return entries


def known(group: Group) -> list[str]:
    """Every name: those that come with shardwise first."""
    return list(dict.fromkeys([*BUILT_IN.get(group, {}), *found(group)]))


def load(entry: EntryPoint) -> Any:
    """Import it. A module stands for the class in it that has this name. What goes wrong in another package is told with the
    package's name."""
    try:
        loaded = entry.load()
        if not isinstance(loaded, ModuleType):
            return loaded
        return next(
            each for each in vars(loaded).values() if isinstance(each, type) and vars(each).get("name") == entry.name
        )
    except ShardwiseError:
        raise
    except Exception as error:
        if entry.dist is None:
            raise
        raise ShardwiseError(
            f"{entry.name!r} of the package {_package(entry)} cannot be loaded from {entry.value}: "
            f"{type(error).__name__}: {one_line(error)}. The whole traceback:  python -c 'import {entry.module}'"
        ) from error


def nearest(name: object, names: Iterable[str]) -> str | None:
    return next(iter(difflib.get_close_matches(str(name), names, n=1)), None)


def _package(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else "shardwise"
