"""What `verify` was asked to prove."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.config import Config, load_config
from shardwise.config.load import config_values
from shardwise.errors import ConfigError


@dataclass(frozen=True)
class Target:
    path: Path
    config: Config | None
    """None: a program, whose config is its own."""

    @classmethod
    def read(cls, file: str | Path, overrides: Sequence[str]) -> Target:
        path = Path(file)
        if path.suffix != ".py":
            return cls(path, load_config(path, overrides))
        if not path.is_file():
            raise ConfigError(f"there is no program {path}")
        if overrides:
            raise ConfigError("--set is for config files; a program's config is its own")
        return cls(path, None)

    @property
    def values(self) -> dict[str, Any] | None:
        """The config as it was read, to be sent to ranks."""
        return None if self.config is None else config_values(self.config)


@dataclass(frozen=True)
class Request:
    target: Target
    against: Target | None
    """What it is compared with, instead of with one process."""
    ranks: int
    strategy: str | None
    """Instead of the config's."""
    steps: int
    planted: str | None
    """Import path of a function that plants a bug in every run: for the tests of verify itself."""
    hang_timeout: float
    """Seconds that a rank may be silent between two steps."""
    say: Callable[[str], None]
    began: float
    """Of time.monotonic."""
    quick: bool = False
    """Numbers and samples alone, in fewer steps."""
