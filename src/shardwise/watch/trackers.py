"""TensorBoard and W&B behind one small interface."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from shardwise.config import Config
from shardwise.errors import MissingExtra


class Tracker(Protocol):
    def log(self, step: int, values: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


def open_trackers(config: Config, folder: Path) -> list[Tracker]:
    makers: dict[str, Callable[[Config, Path], Tracker]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}
    return [makers[name](config, folder) for name in config.training.loggers]


def require_trackers(config: Config) -> None:
    """Say that an extra is missing before anything has started."""
    for name in config.training.loggers:
        try:
            importlib.import_module(name)
        except ImportError:
            raise MissingExtra.of(name, "track", f"training.logger: {name}") from None


class TensorBoard:
    def __init__(self, config: Config, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer: Any = SummaryWriter(str(folder / "tensorboard"))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    """Offline unless the environment says otherwise (WANDB_MODE=online): nothing leaves the machine by default."""

    def __init__(self, config: Config, folder: Path) -> None:
        import wandb

        self.run: Any = wandb.init(
            project=config.training.wandb_project,
            name=config.name,
            dir=str(folder),
            config=config.model_dump(mode="json"),
            mode=os.environ.get("WANDB_MODE", "offline"),  # type: ignore[arg-type]
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=step)

    def close(self) -> None:
        import wandb

        self.run.finish()
        wandb.teardown()  # its service process would stay until this one ends
