"""The arithmetic of batch sizes and of the learning rate that follows from them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardwise.config.schema import Config, Training
from shardwise.errors import ConfigError


@dataclass(frozen=True)
class Batching:
    world: int
    batch_size: int
    accumulation: int
    kept: int | None = None
    """The global batch of a run that goes on with another number of devices, which need not divide it."""

    @property
    def global_batch(self) -> int:
        return self.world * self.batch_size * self.accumulation if self.kept is None else self.kept

    @property
    def divides(self) -> bool:
        return self.world * self.batch_size * self.accumulation == self.global_batch

    def steps_per_epoch(self, samples: int) -> int:
        """The last, short batch is a step too: nothing is dropped."""
        return math.ceil(samples / self.global_batch)


def resolve_batching(training: Training, world: int, *, elastic: bool = False) -> Batching:
    """Accumulation follows from total_batch_size, which must divide evenly, unless the world is whatever is left of it."""
    size = training.batch_size
    if size == "auto":
        raise ConfigError("training.batch_size: auto is found when a run begins; here it must be a number")
    if training.total_batch_size is None:
        return Batching(world, size, training.gradient_accumulation or 1)
    per_pass = size * world
    accumulation, rest = divmod(training.total_batch_size, per_pass)
    if elastic:
        return keep_global_batch(Batching(world, size, 1), training.total_batch_size)
    if rest or not accumulation:
        raise ConfigError(_what_would_divide(training.total_batch_size, size, world, training.num_nodes))
    return Batching(world, size, accumulation)


def with_batch_size(config: Config, size: int) -> Config:
    return config.model_copy(update={"training": config.training.model_copy(update={"batch_size": size})})


def keep_global_batch(batching: Batching, global_batch: int) -> Batching:
    """The same samples per step on another number of devices: accumulation adapts, and the last pass may be short."""
    accumulation = math.ceil(global_batch / (batching.world * batching.batch_size))
    return Batching(batching.world, batching.batch_size, accumulation, kept=global_batch)


def resolve_learning_rate(training: Training, global_batch: int) -> float:
    lr = training.optimizer.lr
    if training.lr_scaling == "linear" and training.base_batch_size:
        return lr * global_batch / training.base_batch_size
    return lr


def _what_would_divide(total: int, batch_size: int, world: int, nodes: int) -> str:
    per_pass = batch_size * world
    totals = sorted({max(1, total // per_pass) * per_pass, math.ceil(total / per_pass) * per_pass})
    remedies = [f"training.total_batch_size: {' or '.join(map(str, totals))}"]
    if total % world == 0:
        per_rank = total // world
        sizes = [size for size in range(per_rank, 0, -1) if per_rank % size == 0][:4]
        remedies.append(f"training.batch_size: {' or '.join(map(str, sizes))}")
    else:
        fits = (count for count in range(world, 0, -1) if count % nodes == 0 and total % (batch_size * count) == 0)
        counts = list(fits)[:3]
        if counts:
            remedies.append(f"training.num_gpus: {' or '.join(map(str, counts))}")
    return (
        f"training.total_batch_size: {total} is not a multiple of batch_size × devices = {batch_size} × {world} = "
        f"{per_pass}.\n  what would fit: {'; or '.join(remedies)}"
    )
