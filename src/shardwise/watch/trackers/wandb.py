"""Weights & Biases."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.config import Config
from shardwise.errors import MissingExtra

try:
    import wandb
except ImportError:
    raise MissingExtra.of("wandb", "track", "training.logger: wandb") from None


class WeightsAndBiases:
    """Offline unless the environment says otherwise (WANDB_MODE=online): nothing leaves the machine by default."""

    def __init__(self, config: Config, folder: Path) -> None:
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
        self.run.finish()
        wandb.teardown()  # its service process would stay until this one ends
