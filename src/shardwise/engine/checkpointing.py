"""What a checkpoint of a run holds, and how a run goes on from it: the verbs `save` and `resume` of a session."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from shardwise.checkpoint import CheckpointStore, Progress, Saver, Written, go_on_from, load_into, load_rank_local
from shardwise.config import Training
from shardwise.data import BatchedSamples
from shardwise.engine.loss_guard import LossHistory
from shardwise.engine.out_of_memory import host_memory
from shardwise.engine.step import nonfinite_before
from shardwise.errors import ConfigError
from shardwise.parallel import World
from shardwise.parallel.memory import gib
from shardwise.watch.heartbeats import Phase, beat

if TYPE_CHECKING:
    from shardwise.engine.session import Session

log = logging.getLogger(__name__)

SLOW_STORAGE = 6
"""Writing a checkpoint may take this many times as long as a rank may otherwise be silent."""
FINISHING = 60.0
"""Seconds that a run which fails waits for a checkpoint that is being written."""

KEPT_FREE = 0.1
"""The share of the host's free memory that checkpoints leave alone."""


def save_run(session: Session, metrics: dict[str, float] | None) -> Path:
    training, parts = session.config.training, session.parts
    beat(Phase.SAVE, session.steps_done)
    session.settle()
    if session.broken is not None:
        raise session.broken
    if training.on_nonfinite == "stop" and session.world.sum(session.bad_loss is not None)[0]:
        raise nonfinite_before(parts, session.steps_done, session.bad_loss)
    session.checkpoints.begin_anew()
    parts.spread.share_buffers()
    metric = (metrics or {}).get(training.monitor)
    if metric is not None and math.isfinite(metric) and _better(metric, session.best_metric, training.monitor_mode):
        session.best_metric = metric
    path = session.checkpoints.write(session, _progress_of(session, metric))
    if not training.async_checkpoint:
        session.checkpoints.poll(wait=True)
    return path


def resume_run(session: Session, which: str) -> Path | None:
    session.checkpoints.poll(wait=True)
    beat(Phase.RESUME, 0)
    parts, spread = session.parts, session.parts.spread
    found = load_into(spread.module, parts.optimizer, which, session.store, session.world)
    if found is None:
        return None
    path, progress = found
    if spread.settles_later and not session.steps_done:
        _rehearse(session)
    if spread.memory is not None:
        own = load_rank_local(path, session.world)
        session.forgot_compression = own is None
        if own is not None:
            spread.memory.restore(own)
    _check_same_run(session, progress)
    session.checkpoints.go_on(path, progress.step)
    _take_back(session, progress)
    return path


def _progress_of(session: Session, metric: float | None) -> Progress:
    """Everything but the tensors, as it is now."""
    return Progress(
        step=session.steps_done,
        cursor=session.cursor,
        skipped_steps=session.skipped_steps,
        metric=metric,
        best_metric=session.best_metric,
        scaler=session.parts.scaler.state_dict(),
        global_batch=session.batching.global_batch,
        samples=len(session.train_data),
        seed=session.config.seed,
        order=_order_name(session),
        skipped_batches=session.skipped_batches,
        recent_losses=list(session.recent_losses.recent),
    )


def _take_back(session: Session, progress: Progress) -> None:
    session.forget_pending_result()
    session.steps_done, session.cursor = progress.step, progress.cursor
    session.begun_at = (progress.step, progress.cursor)
    session.skipped_steps, session.best_metric = progress.skipped_steps, progress.best_metric
    session.batch_before, session.skipped_batches = progress.global_batch, progress.skipped_batches
    session.recent_losses, session.bad_loss = LossHistory(progress.recent_losses), None
    session.parts.schedule = replace(session.parts.schedule, run_steps=session.total_steps)
    if progress.scaler and session.parts.scaler.is_enabled():
        session.parts.scaler.load_state_dict(progress.scaler)


def _check_same_run(session: Session, progress: Progress) -> None:
    samples, seed, order = len(session.train_data), session.config.seed, _order_name(session)
    if progress.cursor.consumed and progress.order not in ("", order):
        raise ConfigError(
            f"the checkpoint lies in the middle of an epoch whose samples come {progress.order!r}; now they would come "
            f"{order!r}, so some would be used twice and some never. Resume with the data block it had, or "
            "from a checkpoint at the end of an epoch"
        )
    if progress.samples != samples or progress.seed != seed:
        raise ConfigError(
            f"the checkpoint was made with {progress.samples} training samples and seed {progress.seed}, but there "
            f"are {samples} and seed {seed} now: the order of samples would not continue"
        )


def _order_name(session: Session) -> str:
    origin = session.train_data.origin if isinstance(session.train_data, BatchedSamples) else ""
    return f"{origin} {session.order().name}".strip()


def _rehearse(session: Session) -> None:
    """A backward pass whose gradients are thrown away. DDP settles after the first one which gradients travel together
    and in which order, and so how they are added up: a resumed run must do that before its first step."""
    parts, module = session.parts, session.parts.spread.module
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    inputs = session.first_inputs()
    with parts.spread.computing(), parts.spread.reducing_gradients(now=True):
        with parts.precision.autocast():
            loss = session.task.loss(session.model, inputs)
        loss.sum.backward()
    parts.optimizer.zero_grad()
    for name, buffer in module.named_buffers():  # by name: a forward may have put another tensor in its place
        buffer.copy_(before[name])


def _better(metric: float, than: float | None, mode: str) -> bool:
    if than is None:
        return True
    return metric < than if mode == "min" else metric > than


class Checkpoints:
    """Those of this session: which are its own, which is the newest, what became of each."""

    def __init__(self, store: CheckpointStore, world: World, training: Training) -> None:
        self.store, self.world, self.training = store, world, training
        self.saved_at: int | None = None
        """The step of the newest checkpoint of this session, in place or being written."""
        self.on_written: Callable[[Written], None] = self._warn
        """Called at the next step after a checkpoint is in place, or could not be written."""
        self.saver: Saver | None = None
        self._said = False
        self._owns_folder = False
        """Whether the checkpoints that lie in the folder belong to this run."""
        self._to_reserve = 0

    def open(self, parameters: Iterable[nn.Parameter], copies: int) -> None:
        """When the model is there. `copies`: how many ranks hold the same tensors, and write a part of them each."""
        self.saver = Saver(
            self.store,
            self.world,
            self._retire,
            alive=lambda: beat(Phase.SAVE),
            patience=SLOW_STORAGE * self.training.hang_timeout,
            room=self._room,
        )
        room = self._room()
        needed = self.saver.needed(parameters, copies)
        if needed > room:
            self._say_that_training_waits(needed, room)
        elif self.training.async_checkpoint:
            self._to_reserve = int(min(needed, room / 2))

    def _room(self) -> float:
        """Bytes of host memory for each rank of this machine; infinite where that is not known."""
        free, total = host_memory()
        return free * (1 - KEPT_FREE) / int(os.environ.get("LOCAL_WORLD_SIZE", self.world.size)) if total else math.inf

    def _say_that_training_waits(self, *sizes: float) -> None:
        if self.world.local_rank == 0 and not self._said:
            needed = " ({} per rank, and there are {})".format(*map(gib, sizes)) if sizes else ""
            log.warning(
                f"host memory has no room for a copy of a checkpoint{needed}: training waits while one is written"
            )
        self._said = True

    def step_made(self) -> None:
        """After the first step, memory for checkpoints is taken: it takes seconds, and a start has enough to do."""
        if self._to_reserve and self.saver is not None:
            self.saver.reserve(self._to_reserve)
            self._to_reserve = 0

    def begin_anew(self) -> None:
        """Not resumed: checkpoints that lie in the folder belong to an earlier run, and must not be taken for this one's."""
        if not self._owns_folder:
            go_on_from(-1, self.store, self.world)
            self._owns_folder = True

    def go_on(self, path: Path, step: int) -> None:
        """From this one: what lies in the folder from then on is this run's."""
        elsewhere = path.parent.resolve() != self.store.folder.resolve()
        go_on_from(-1 if elsewhere else step, self.store, self.world)
        self.saved_at = None if elsewhere else step
        self._owns_folder = True

    def write(self, session: Session, progress: Progress) -> Path:
        assert self.saver is not None  # session.parts would have complained
        spread = session.parts.spread
        own = spread.memory.tensors() if spread.memory else None
        path = self.saver.save(spread.module, session.parts.optimizer, progress, own)
        if self.saver.made_wait:
            self._say_that_training_waits()
        self.saved_at = progress.step
        return path

    def poll(self, *, wait: bool = False) -> list[Written]:
        """What has become of those asked for since the last call; with `wait`, when the one under way is done."""
        if self.saver is None:
            return []
        written = self.saver.wait() if wait else self.saver.finished()
        for each in written:
            if each.problem and self.saved_at == each.step:
                self.saved_at = None
            self.on_written(each)
        return written

    def give_up(self) -> None:
        """The run fails: what is under way may still get there, if the other ranks are."""
        if self.saver is not None:
            self.saver.wait(FINISHING)

    def _warn(self, written: Written) -> None:
        if written.problem and self.world.is_first:
            log.warning(f"{written.problem}; training goes on")

    def _retire(self) -> None:
        training = self.training
        self.store.retire(keep_best=training.save_top_k, mode=training.monitor_mode, keep_last=training.keep_last)
