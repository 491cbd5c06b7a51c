"""How long this rank's forward passes take: what it computes before it must wait for the others."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shardwise.parallel import ParallelModel


class ForwardTimer:
    """Where the model is whole, forward passes are this rank's own work: on CUDA its device is asked, which takes two events
    per micro-batch. Where it is sharded, they wait for the weights of others; then only the processor time of this thread is
    its own. In a pipeline the ranks have different work by design, and nothing is measured."""

    def __init__(self, spread: ParallelModel) -> None:
        self._measured = spread.pipeline is None
        self._sharded = spread.layout.size("shard") > 1 or spread.layout.size("tensor") > 1
        self._on_device = spread.layout.world.device.type == "cuda" and not self._sharded
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        if not self._measured:
            yield
        elif self._on_device:
            began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            began.record()
            yield
            ended.record()
            self._events.append((began, ended))
        else:
            now = time.thread_time if self._sharded else time.perf_counter
            start = now()
            yield
            self._seconds += now() - start

    def seconds(self) -> float:
        """Asked after the host has waited for the device anyway."""
        return self._seconds + sum(began.elapsed_time(ended) for began, ended in self._events) / 1000
