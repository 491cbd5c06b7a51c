"""What is trained: the config's task, one that was handed over, or a user's own model, data and loss made into one. So every
loop goes through the same training path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from shardwise.config import Config
from shardwise.config.load import load_task_class, make_task
from shardwise.data import BatchedSamples
from shardwise.errors import ConfigError, DataError, ShardwiseError
from shardwise.parallel import World
from shardwise.tasks import Loss, Task


def task_for(
    config: Config,
    task: Task | None,
    model: nn.Module | None,
    data: Any,
    loss: Callable[[nn.Module, Any], Loss] | None,
    valid: Any,
    collate: Callable[[list[Any]], Any] | None,
    count: Callable[[Any], int] | None,
) -> Task:
    if model is not None or data is not None or loss is not None:
        if model is None or data is None or loss is None:
            raise ShardwiseError("session.prepare() needs model, data and loss together")
        return OwnTask(config, model, data, loss, valid, collate, count)
    if task is not None:
        return task
    kind = load_task_class(config.task)
    if not issubclass(kind, Task):
        raise ConfigError(f"task: {config.task}: {kind.__name__} is not a subclass of shardwise.Task")
    if missing := sorted(getattr(kind, "__abstractmethods__", ())):
        raise ConfigError(f"task: {config.task}: {kind.__name__} has no {', '.join(missing)}")
    return make_task(config)


def check_data(train: Any, valid: Any, world: World) -> None:
    """That it can be read as the loader does, and is the same on every rank."""
    for data in (train, valid):
        by_index = isinstance(data, BatchedSamples) or (hasattr(data, "__len__") and hasattr(data, "__getitem__"))
        if data is not None and not by_index:
            raise DataError(f"data must have a length and be read by index, unlike {type(data).__name__}")
    if not len(train):
        raise DataError("the training data is empty")
    sizes = [tuple(each) for each in world.gather((len(train), None if valid is None else len(valid)))]
    if len(set(sizes)) > 1:
        raise DataError(
            f"the ranks see data of different sizes (training, validation): {sizes}. They must read the same files"
        )


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
        self._model, self._data, self.loss_function, self._valid = model, data, loss, valid
        self._collate, self._count = collate or super().collate, count or super().count

    def train_data(self) -> Any:
        return self._data

    def valid_data(self) -> Any:
        return self._valid

    def build_model(self) -> nn.Module:
        return self._model

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return self.loss_function(model, batch)

    def collate(self, samples: list[Any]) -> Any:
        return self._collate(samples)

    def count(self, batch: Any) -> int:
        return self._count(batch)
