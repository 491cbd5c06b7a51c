"""`training.batch_size: auto`: the largest micro-batch that fits into the smallest device of all, found before training.

On CUDA, micro-batches of growing size are tried and measured. On the CPU, where memory runs out by a kill and not by an error,
two small ones are looked at and the rest is predicted. Nothing that is tried leaves a trace: no update is made, and
gradients, running statistics and random states are put back.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from shardwise.compat.tensors import tree_leaves, tree_map_only
from shardwise.config import Config, with_batch_size
from shardwise.config.yaml_lines import read_file, read_yaml
from shardwise.data import GlobalOrder, Reader
from shardwise.data.seeding import generators_kept
from shardwise.engine.batch_plan import BatchPlan
from shardwise.engine.host_memory import host_memory
from shardwise.engine.out_of_memory import ran_out
from shardwise.engine.parts import Parts
from shardwise.errors import ConfigError, OutOfMemory
from shardwise.parallel.gather import Scope, gathering
from shardwise.parallel.memory import gib

LEFT_FREE = 0.1
"""The share of a device's memory that is kept for fragments, longer samples, and what libraries take."""
AT_MOST = {"cpu": 256, "cuda": 4096}
LOOKED_AT = 128
"""Samples, at most, among which the largest are chosen to try with."""
BACKWARD = 2.0
"""On the CPU: the bytes that a forward and backward pass take at their fullest, by those that the forward pass keeps."""


def find_batch_size(parts: Parts, plan: BatchPlan, data: Any, order: GlobalOrder) -> tuple[int, str]:
    """Every rank comes here together and finds the same. Also returns a sentence on how it was found."""
    device, copies = parts.world.device.type, plan.batching.world
    cap = min(AT_MOST[device], max(1, len(data) // copies))
    trial = _Trial(parts, plan.devices_per_process, data, order)
    fits = _Measured(trial) if device == "cuda" else _Predicted(trial)
    found = largest(fits, cap)
    if not found:
        raise ConfigError(
            f"training.batch_size: auto: not even one sample fits: {fits.said()}. Shard the model (training.strategy: fsdp), "
            "recompute activations (training.fsdp.activation_checkpointing: true), or use bf16"
        )
    chosen = _dividing(found, parts.config.training.total_batch_size, copies)
    why = f" (up to {found} fit; {chosen} divides training.total_batch_size)" if chosen != found else ""
    most = f", as large as it may be here ({cap})" if found == cap else ""
    return chosen, f"batch_size: auto: {chosen} per device{why}{most}; {fits.said()}"


def largest(fits: Callable[[int], bool], cap: int) -> int:
    """By doubling, then once more between the last two. 0 if nothing fits."""
    if not fits(1):
        return 0
    size = 1
    while size < cap:
        bigger = min(2 * size, cap)
        if not fits(bigger):
            middle = (size + bigger) // 2
            return middle if middle > size and fits(middle) else size
        size = bigger
    return size


def found_before(config: Config) -> Config:
    """A run that goes on has the batch size that was found when it began."""
    if config.training.batch_size != "auto":
        return config
    try:
        before = read_yaml(read_file(Path(config.run_folder) / "config.yaml"), "it").values
        size = before["training"]["batch_size"]
    except (ConfigError, KeyError, TypeError):
        return config
    return with_batch_size(config, size) if isinstance(size, int) and size > 0 else config


def _dividing(found: int, total: int | None, world: int) -> int:
    return found if total is None else next(size for size in range(found, 0, -1) if total // world % size == 0)


class _Measured:
    """What CUDA's allocator reserves at its fullest, against what there is."""

    def __init__(self, trial: _Trial) -> None:
        self.trial, self.world = trial, trial.parts.world
        self.peaks: list[tuple[int, float]] = []
        device = self.world.device
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(device)
        room = (free + torch.cuda.memory_reserved(device)) * (1 - LEFT_FREE)
        self.room = min(self.world.gather(room))

    def __call__(self, size: int) -> bool:
        # Where the model is sharded, a rank that runs out leaves the others waiting: so do not try what cannot fit.
        if len(self.peaks) > 1 and self._expected(size) > self.room:
            return False
        device = self.world.device
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        peak = math.inf
        try:
            self.trial.run(size)
            torch.cuda.synchronize(device)
            peak = float(torch.cuda.max_memory_reserved(device))
        except RuntimeError as error:
            if not ran_out(error):
                raise
            if self.trial.parts.strategy.waits_for_others:
                raise OutOfMemory(
                    f"training.batch_size: auto: {size} sample(s) per device ran out of memory on rank "
                    f"{self.world.rank}, and the others wait for it in the middle of the model. Write "
                    f"training.batch_size: {max(1, size // 2)} into the file"
                ) from error
        except ValueError as error:
            if size > 1 or "more than 1 value per channel" not in str(error):
                raise
            return True  # batch norm cannot take one sample; every rank finds that
        self.trial.put_back()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        fullest = max(self.world.gather(peak))
        if math.isfinite(fullest):
            self.peaks.append((size, fullest))
        return fullest <= self.room

    def _expected(self, size: int) -> float:
        (small, before), (large, after) = self.peaks[-2:]
        return after + (size - large) * max(0.0, after - before) / (large - small)

    def said(self) -> str:
        tried = ", ".join(f"{size}: {gib(peak)}" for size, peak in self.peaks[-3:])
        return f"reserved at the fullest ({tried}), of {gib(self.room)} with {LEFT_FREE:.0%} left free"


class _Predicted:
    """On the CPU: by what the forward pass keeps of one sample, against what is available to each rank of this machine."""

    def __init__(self, trial: _Trial) -> None:
        world = trial.parts.world
        kept = {size: trial.run(min(size, len(trial.data))) for size in (2, 4)}
        trial.put_back()
        here = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
        # What does not grow, such as gathered weights, is left out by the difference.
        growth = (kept[4] - kept[2]) / 2 if kept[4] > kept[2] else kept[2] / 2
        mine = (growth * BACKWARD, host_memory()[0] / here * (1 - LEFT_FREE))
        everyone = world.gather(mine)
        self.per_sample, self.room = max(each for each, _ in everyone), min(room for _, room in everyone)

    def __call__(self, size: int) -> bool:
        return size * self.per_sample <= self.room

    def said(self) -> str:
        return f"predicted: {gib(self.per_sample)} per sample, of {gib(self.room)} with {LEFT_FREE:.0%} left free"


class _Trial:
    """Forward and backward, twice, as with accumulation: the second time with gradients in place. Weights stay as they are."""

    def __init__(self, parts: Parts, devices_per_process: int, data: Any, order: GlobalOrder) -> None:
        self.parts, self.data, self.devices = parts, data, devices_per_process
        self.buffers = [(buffer, buffer.clone()) for buffer in parts.strategy.module.buffers()]
        self.reader = Reader(data, parts.task.collate, parts.task.count, parts.config.seed)
        self._sizes: dict[int, int] = {}
        self.order = order.part(0, 0, min(len(data), AT_MOST[parts.world.device.type]))

    def run(self, size: int) -> float:
        """Returns the bytes that the forward pass keeps for the backward pass."""
        parts, strategy, device = self.parts, self.parts.strategy, self.parts.world.device
        inputs = self._inputs(size * self.devices)
        kept: dict[int, int] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storage = _local(tensor).untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), generators_kept():
            for _ in range(2):
                kept.clear()
                with (
                    strategy.computing(),
                    strategy.reducing_gradients(),
                    gathering(Scope(strategy.layout, alone=True)),
                    torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
                ):
                    with parts.precision.autocast():
                        loss = parts.task.loss(strategy.alone, inputs)
                    loss.sum.backward()
        copies = strategy.low_precision.copies if strategy.low_precision is not None else []
        weights = [*strategy.alone.parameters(), *copies]
        owned = {_local(parameter).untyped_storage().data_ptr() for parameter in weights}
        return float(sum(bytes_ for place, bytes_ in kept.items() if place not in owned))

    def put_back(self) -> None:
        self.parts.optimizer.zero_grad()
        with torch.no_grad():
            for buffer, before in self.buffers:
                buffer.copy_(before)

    def _inputs(self, size: int) -> Any:
        """The largest of the first samples: a run meets long ones sooner or later."""
        looked_at = self.order[: max(size, min(4 * size, LOOKED_AT))]
        by_size = sorted(looked_at.tolist(), key=self._size_of, reverse=True)
        read = self.reader.micro_batch(np.array((by_size * -(-size // len(by_size)))[:size], np.int64))
        return tree_map_only(torch.Tensor, lambda tensor: tensor.to(self.parts.world.device), read)

    def _size_of(self, index: int) -> int:
        if index not in self._sizes:
            tensors = [
                each
                for each in tree_leaves(self.reader.micro_batch(np.array([index])))
                if isinstance(each, torch.Tensor)
            ]
            self._sizes[index] = sum(tensor.numel() for tensor in tensors)
        return self._sizes[index]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
