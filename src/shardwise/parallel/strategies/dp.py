"""One process that drives all devices of a machine (DataParallel): the baseline that the others are measured against."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.parallel import DataParallel

from shardwise.parallel.layout import Layout
from shardwise.parallel.memory import Remedy, Shortage
from shardwise.parallel.recipe import ModelSpec, whole_model
from shardwise.parallel.strategies.fsdp import sharded_instead
from shardwise.parallel.strategy import Strategy


class DataParallelStrategy(Strategy):
    name = "dp"
    one_process = True
    cuts_rows = True
    compiles = False

    def devices_per_process(self, kind: str) -> int:
        return max(1, torch.cuda.device_count()) if kind == "cuda" else 1

    def lighter(self, shortage: Shortage) -> Iterator[Remedy]:
        return sharded_instead(self, shortage)

    def wrap(self, spec: ModelSpec, layout: Layout) -> None:
        self.layout = layout
        self.module, self.regions = whole_model(spec, self.training, layout.world)
        self.model = DataParallel(self.module) if torch.cuda.device_count() > 1 else self.module

    def notes(self, micro_batches: int) -> Iterator[str]:
        yield (
            "dp: one process drives all devices, copies the model at every step and waits for the slowest: it is the slow "
            "one. ddp computes the same"
        )
