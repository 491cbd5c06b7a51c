"""One process that drives all devices of a machine (DataParallel): the baseline that the others are measured against."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.parallel import DataParallel

from shardwise.parallel.layout import Layout
from shardwise.parallel.memory import Remedy, Shortage
from shardwise.parallel.recipe import ModelSpec, whole_model
from shardwise.parallel.strategies.fsdp import sharded_instead
from shardwise.parallel.strategy import Devices, Strategy


class DataParallelStrategy(Strategy):
    name = "dp"
    one_process = True
    cuts_rows = True
    compiles = False

    def devices_per_process(self, kind: str) -> int:
        return max(1, torch.cuda.device_count()) if kind == "cuda" else 1

    def refusals(self, devices: Devices) -> Iterator[str]:
        if devices.ranks > 1:
            yield (
                f"strategy: dp is one process, but {devices.ranks} ranks were started; ddp is for several. dp drives all GPUs of "
                "a machine by itself: with it, leave training.num_gpus out (verify: --ranks 1)"
            )
        yield from super().refusals(devices)

    def lighter(self, shortage: Shortage) -> Iterator[Remedy]:
        return sharded_instead(self, shortage)

    def wrap(self, spec: ModelSpec, layout: Layout) -> None:
        self.layout = layout
        self.module, self.regions = whole_model(spec, self.training, layout.world)
        self.model = DataParallel(self.module) if torch.cuda.device_count() > 1 else self.module

    def notes(self, micro_batches: int) -> Iterator[str]:
        device = self.layout.world.device.type
        found = torch.cuda.device_count() if device == "cuda" else 0
        if found < 2:
            what = "one GPU" if found else "no GPU"
            yield (
                f"dp: it is for two or more GPUs of one machine, and here it drives {what}: it computes as strategy: single "
                "does, on one device. Use strategy: single; or ddp, which runs several processes on CPUs, too (num_gpus: 2)"
            )
            return
        yield (
            "dp: one process drives all devices, copies the model at every step and waits for the slowest: it is the slow "
            "one. ddp computes the same"
        )
