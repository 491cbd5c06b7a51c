"""A user's own model, data and loss, as a Task: so that their loop goes through the same training path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from shardwise.config import Config
from shardwise.tasks import Loss, Task


class OwnTask(Task):
    def __init__(
        self,
        config: Config,
        model: nn.Module,
        data: Any,
        loss: Callable[[nn.Module, Any], Loss],
        valid: Any = None,
        collate: Callable[[list[Any]], Any] | None = None,
        count: Callable[[Any], int] | None = None,
    ) -> None:
        super().__init__(config)
        self._model, self._data, self._loss, self._valid = model, data, loss, valid
        self._collate, self._count = collate or super().collate, count or super().count

    def train_data(self) -> Any:
        return self._data

    def valid_data(self) -> Any:
        return self._valid

    def build_model(self) -> nn.Module:
        return self._model

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return self._loss(model, batch)

    def collate(self, samples: list[Any]) -> Any:
        return self._collate(samples)

    def count(self, batch: Any) -> int:
        return self._count(batch)
