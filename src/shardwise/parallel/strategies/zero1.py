"""ddp whose optimizer state is shared: every rank keeps the state of some parameters, updates those and sends them around."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import torch

from shardwise.parallel.advice import Question, Suggestion
from shardwise.parallel.memory import ModelSizes, Remedy, Shortage, StateBytes, gib
from shardwise.parallel.strategies.ddp import DistributedDataParallelStrategy
from shardwise.parallel.strategies.fsdp import sharded_instead


class ZeroRedundancy(DistributedDataParallelStrategy):
    name = "zero1"

    def held_bytes(self, sizes: ModelSizes, ranks: int) -> StateBytes:
        whole = super().held_bytes(sizes, ranks)
        return replace(whole, optimizer=whole.optimizer / ranks)

    def suggestions(self, question: Question) -> Iterator[Suggestion]:
        machines = question.machines
        held = self.held_bytes(question.sizes, machines.devices)
        if machines.devices > 1:
            yield Suggestion(
                self.name,
                [f"strategy: {self.name}"],
                held,
                order=1,
                preferred=None if machines.slow_network else 2,
                why=f"Most of it is optimizer state: zero1 shards that alone, {gib(held.total)} per device, and sends no more "
                "than ddp.",
            )

    def lighter(self, shortage: Shortage) -> Iterator[Remedy]:
        return sharded_instead(self, shortage)

    def make_optimizer(
        self, kind: Callable[..., torch.optim.Optimizer], groups: list[dict[str, Any]], settings: dict[str, Any]
    ) -> torch.optim.Optimizer:
        if not self.shards_optimizer:
            return super().make_optimizer(kind, groups, settings)
        from torch.distributed.optim import ZeroRedundancyOptimizer  # half a second, which others need not wait for

        return ZeroRedundancyOptimizer(groups, cast(type[torch.optim.Optimizer], kind), **settings)

    @property
    def shards_optimizer(self) -> bool:
        return self.layout.world.size > 1
