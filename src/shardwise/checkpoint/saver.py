"""Checkpoints while training goes on: what is to be written is copied, and a thread of its own writes it.

At most one is under way. The next one waits for it, so that memory for one copy is all that is ever needed.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.checkpoint.state import OnPhase, stage_from, write_staged
from shardwise.checkpoint.store import CheckpointStore
from shardwise.checkpoint.tensors import StagingBuffer
from shardwise.errors import CheckpointError
from shardwise.parallel import World


@dataclass(frozen=True)
class Written:
    """What became of a checkpoint."""

    step: int
    path: Path
    stall: float
    """Seconds that training stood still for it."""
    seconds: float
    """Until it was in place, from when it was asked for."""
    cause: Exception | None = None
    """Why it could not be written. The ones before it are still there."""

    @property
    def problem(self) -> str | None:
        """The same, in words."""
        if self.cause is None:
            return None
        return str(self.cause) if isinstance(self.cause, CheckpointError) else repr(self.cause)


class Saver:
    def __init__(
        self,
        store: CheckpointStore,
        world: World,
        retire: Callable[[], None],
        alive: Callable[[], None] = lambda: None,
        patience: float = math.inf,
        room: Callable[[], float] = lambda: math.inf,
    ) -> None:
        """All ranks make one together.

        `room`: bytes of host memory that this rank may still take; where a copy needs more, training waits for the writing.
        `retire`: called on rank 0 when another checkpoint is in place, to let old ones go. `alive`: called every second while
        training waits for the thread, for as long as `patience` seconds.
        """
        self.store, self.world, self._retire = store, world, retire
        self._alive, self._patience = alive, patience
        # Collectives of a thread and of training may not share connections: they would answer each other (torch 2.13).
        self._apart = world.apart()
        self._stage = StagingBuffer(world.rank, world.device, room)
        self.on_phase: OnPhase = lambda phase: None
        """Called by the thread that writes. What it raises keeps the checkpoint from being made."""
        self._watched: torch.optim.Optimizer | None = None
        self._thread: threading.Thread | None = None
        self._written: list[Written] = []

    @property
    def made_wait(self) -> bool:
        """Whether training waited for the last one to be written, for want of memory."""
        return not self._stage.copied

    @staticmethod
    def needed(parameters: Iterable[nn.Parameter], copies: int) -> int:
        """How many bytes this rank will write: its weights, and moments like Adam's, shared by `copies`."""
        own = sum((each.to_local() if isinstance(each, DTensor) else each).nbytes for each in parameters)
        return 3 * own // copies

    def reserve(self, size: int) -> None:
        """Take memory for that many bytes ahead, while training runs."""
        self._stage.reserve(size)

    def save(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        step: int,
        about: dict[str, Any],
        own: dict[str, torch.Tensor] | None = None,
    ) -> Path:
        """Copy the state, and leave it to the thread. Returns where the checkpoint will be. `about`: what else is to be
        remembered, as JSON knows it. `own`: tensors of this rank alone."""
        began = time.perf_counter()
        self._join(None)
        if optimizer is not self._watched:
            optimizer.register_step_pre_hook(lambda *_: self._stage.before_update())
            self._watched = optimizer
        stage_from(model, optimizer, self.world, self._stage, own)
        stall = time.perf_counter() - began
        # A daemon: when a run breaks off, it must not wait for peers that are gone.
        self._thread = threading.Thread(
            target=self._write, args=(step, about, began, stall), name="checkpoint", daemon=True
        )
        self._thread.start()
        if not self._stage.copied:
            self._join(None)
        return self.store.place(step)

    def finished(self) -> list[Written]:
        """What has been written, or failed to be, since the last call. Costs nothing while one is under way."""
        if self._thread is not None and self._thread.is_alive():
            return []
        self._thread = None
        written, self._written = self._written, []
        return written

    def wait(self, seconds: float | None = None) -> list[Written]:
        """The same, when the one under way is done."""
        self._join(seconds)
        return self.finished()

    def _join(self, seconds: float | None) -> None:
        """While the thread writes, training is alive, if not for ever: storage may be gone."""
        began = time.monotonic()
        while self._thread is not None and self._thread.is_alive():
            waited = time.monotonic() - began
            if seconds is not None and waited >= seconds:
                return
            if waited < self._patience:
                self._alive()
            self._thread.join(1.0 if seconds is None else min(1.0, seconds - waited))

    def _write(self, step: int, about: dict[str, Any], began: float, stall: float) -> None:
        path, cause = self.store.place(step), None
        try:
            path = write_staged(self._stage, step, about, self.store, self._apart, self.on_phase)
            if self.world.is_first:
                with contextlib.suppress(OSError):  # tried again at the next one
                    self._retire()
        except Exception as error:  # whatever it is, training must hear of it: nobody else sees what a thread raises
            cause = error
        seconds = time.perf_counter() - began
        self._written.append(Written(step, path, stall if self._stage.copied else seconds, seconds, cause))
