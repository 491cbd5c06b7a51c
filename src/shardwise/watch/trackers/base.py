"""What a tracker is, and those that a config names: found by name, opened on rank 0, kept from ending the run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from shardwise.config import Config
from shardwise.config.registry import load, lookup
from shardwise.errors import ConfigError, one_line

log = logging.getLogger(__name__)


class Tracker(Protocol):
    """Made by rank 0 from the config and the run folder when a run begins or goes on."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


def require_trackers(config: Config) -> None:
    """Say that a package is missing before anything has started."""
    for name in config.training.loggers:
        _maker_of(name)


def open_trackers(config: Config, folder: Path) -> list[Tracker]:
    return [_Guarded(name, _maker_of(name)(config, folder)) for name in config.training.loggers]


def _maker_of(name: str) -> Callable[[Config, Path], Tracker]:
    entry = lookup("shardwise.trackers", name)
    if entry is None:  # the config was checked where its package was installed
        raise ConfigError(f"training.logger: {name}: no installed package has this tracker. Install it, or set another")
    maker = load(entry)
    if not callable(maker):
        raise ConfigError(f"training.logger: {name} stands for {entry.value}, which cannot be called to make a tracker")
    return maker


class _Guarded:
    """A tracker that raises gets nothing more. The run goes on: metrics.jsonl has every number."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self.name, self.tracker, self.failed = name, tracker, False

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self.failed:
            return
        try:
            self.tracker.log(step, values)
        except Exception as error:
            self._tell(f"failed at step {step} and gets nothing more", error)

    def close(self) -> None:
        try:
            self.tracker.close()
        except Exception as error:
            self._tell("could not be closed", error)

    def _tell(self, what: str, error: Exception) -> None:
        if not self.failed:
            log.warning(
                f"tracker {self.name} {what}: {type(error).__name__}: {one_line(error)}. metrics.jsonl has every number"
            )
        self.failed = True
