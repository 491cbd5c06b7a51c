"""How long this rank's forward passes take: what it computes before it must wait for the others."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch


class ForwardTimer:
    """`clock`: the one by which they are this rank's own work (`Strategy.forward_clock`). The device's takes two events per
    micro-batch. None: nothing is measured."""

    def __init__(self, clock: Literal["device", "host", "thread"] | None) -> None:
        self._clock = clock
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        if self._clock is None:
            yield
        elif self._clock == "device":
            began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            began.record()
            yield
            ended.record()
            self._events.append((began, ended))
        else:
            now = time.thread_time if self._clock == "thread" else time.perf_counter
            start = now()
            yield
            self._seconds += now() - start

    def seconds(self) -> float:
        """Asked after the host has waited for the device anyway."""
        return self._seconds + sum(began.elapsed_time(ended) for began, ended in self._events) / 1000
