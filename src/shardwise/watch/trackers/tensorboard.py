"""TensorBoard: event files in the run folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.config import Config
from shardwise.errors import MissingExtra

try:
    import tensorboard  # noqa: F401
except ImportError:
    raise MissingExtra.of("tensorboard", "track", "training.logger: tensorboard") from None


class TensorBoard:
    def __init__(self, config: Config, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer: Any = SummaryWriter(str(folder / "tensorboard"))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()
