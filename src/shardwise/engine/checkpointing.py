"""The checkpoints of a run: which are its own, which is the newest, what became of each; and how a run goes on from one."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any

from shardwise.checkpoint import CheckpointStore, Saver, Written, begin_anew, go_on_from, load_into, load_rank_local
from shardwise.config import Training
from shardwise.engine.host_memory import host_memory
from shardwise.engine.parts import Parts
from shardwise.engine.state import RunState
from shardwise.errors import ConfigError, StorageLost
from shardwise.parallel import World
from shardwise.parallel.gather import Scope, gathering
from shardwise.parallel.memory import gib
from shardwise.watch.heartbeats import Phase, beat

log = logging.getLogger(__name__)

SLOW_STORAGE = 6
"""Writing a checkpoint may take this many times as long as a rank may otherwise be silent."""
FINISHING = 60.0
"""Seconds that a run which fails waits for a checkpoint that is being written."""

KEPT_FREE = 0.1
"""The share of the host's free memory that checkpoints leave alone."""


class Checkpoints:
    def __init__(self, store: CheckpointStore, world: World, training: Training) -> None:
        self.store, self.world, self.training = store, world, training
        self.saved_at: int | None = None
        """The step of the newest checkpoint of this session, in place or being written."""
        self.on_written: Callable[[Written], None] = lambda written: None
        """Called at the next step after a checkpoint is in place, or could not be written."""
        self.saver: Saver | None = None
        self._said = False
        self._owns_folder = False
        """Whether the checkpoints that lie in the folder belong to this run."""
        self._to_reserve = 0

    def open(self, parts: Parts) -> None:
        """When the model is there."""
        self.saver = Saver(
            self.store,
            self.world,
            self._retire,
            alive=lambda: beat(Phase.SAVE),
            patience=SLOW_STORAGE * self.training.hang_timeout,
            room=self._room,
        )
        # Ranks that hold the same tensors write a part of them each.
        layout = parts.strategy.layout
        room = self._room()
        needed = self.saver.needed(parts.strategy.module.parameters(), layout.data_size // layout.size("shard"))
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

    def begin_anew(self, *, asked: bool = False) -> None:
        """Not resumed: checkpoints that lie in the folder belong to an earlier run, and must not be taken for this one's.

        `asked`: the user has said so.
        """
        if not self._owns_folder:
            begin_anew(self.store, self.world, asked=asked)
            self._owns_folder = True

    def go_on(self, path: Path, step: int) -> None:
        """From this one: what lies in the folder from then on is this run's."""
        elsewhere = path.parent.resolve() != self.store.folder.resolve()
        if elsewhere:
            begin_anew(self.store, self.world, asked=True)
        else:
            go_on_from(step, self.store, self.world)
        self.saved_at = None if elsewhere else step
        self._owns_folder = True

    def save(self, parts: Parts, state: RunState) -> Path:
        """All ranks together. It is written while training goes on, unless training.async_checkpoint is false."""
        assert self.saver is not None  # session.parts would have complained
        self.begin_anew()
        strategy = parts.strategy
        path = self.saver.save(
            strategy.module, parts.optimizer, state.step, state.as_plain(), strategy.extra_state() or None
        )
        if self.saver.made_wait:
            self._say_that_training_waits()
        self.saved_at = state.step
        if not self.training.async_checkpoint:
            self.poll(wait=True)
        return path

    def load(self, parts: Parts, which: str, labels: list[str]) -> tuple[Path, RunState] | None:
        """Weights and moments of `auto`, `latest` or a path; and what else the run remembered. `labels`: of the outputs now."""
        self.poll(wait=True)

        def check(path: Path) -> None:  # before the weights, whose shapes would say it less plainly
            refuse_other_labels(RunState.of_checkpoint(path).labels, labels)

        path = load_into(parts.strategy.module, parts.optimizer, which, self.store, self.world, check)
        return None if path is None else (path, RunState.of_checkpoint(path))

    def poll(self, *, wait: bool = False) -> list[Written]:
        """What has become of those asked for since the last call; with `wait`, when the one under way is done."""
        if self.saver is None:
            return []
        written = self.saver.wait() if wait else self.saver.finished()
        for each in written:
            if each.problem and self.saved_at == each.step:
                self.saved_at = None
            self.on_written(each)
            if isinstance(each.cause, StorageLost):
                raise each.cause
        return written

    def give_up(self) -> None:
        """The run fails: what is under way may still get there, if the other ranks are."""
        if self.saver is not None:
            self.saver.wait(FINISHING)

    def _retire(self) -> None:
        training = self.training
        self.store.retire(keep_best=training.save_top_k, mode=training.monitor_mode, keep_last=training.keep_last)


def load_extra_state(parts: Parts, path: Path) -> bool:
    """What the strategy keeps of each rank. False: the checkpoint has none for this strategy and number of ranks."""
    if parts.strategy.extra_state() is None:
        return True
    own = load_rank_local(path, parts.world)
    return own is not None and parts.strategy.load_extra_state(own)


def rehearse(parts: Parts, inputs: Any) -> None:
    """A backward pass whose gradients are thrown away. DDP decides after the first one which gradients travel together
    and in which order, and so how they are added up: a resumed run must do that before its first step."""
    strategy, module = parts.strategy, parts.strategy.module
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    with strategy.computing(), strategy.reducing_gradients(), gathering(Scope(strategy.layout, alone=True)):
        with parts.precision.autocast():
            loss = parts.task.loss(strategy.model, inputs)
        loss.sum.backward()
    parts.optimizer.zero_grad()
    for name, buffer in module.named_buffers():  # by name: a forward may have put another tensor in its place
        buffer.copy_(before[name])


def refuse_another_run(loaded: RunState, current: RunState) -> None:
    """Both as they say of themselves."""
    if loaded.cursor.consumed and loaded.order not in ("", current.order):
        raise ConfigError(
            f"the checkpoint lies in the middle of an epoch whose samples come {loaded.order!r}; now they would come "
            f"{current.order!r}, so some would be used twice and some never. Resume with the data block it had, or "
            "from a checkpoint at the end of an epoch"
        )
    if loaded.samples != current.samples or loaded.seed != current.seed:
        raise ConfigError(
            f"the checkpoint was made with {loaded.samples} training samples and seed {loaded.seed}, but there "
            f"are {current.samples} and seed {current.seed} now: the order of samples would not continue"
        )


def refuse_other_labels(before: list[str], now: list[str]) -> None:
    """What the model's outputs stood for when the checkpoint was written, if that is known, and now."""
    if not before or before == now:
        return
    pairs = enumerate(zip_longest(before, now))
    number, (was, is_now) = next((number, pair) for number, pair in pairs if pair[0] != pair[1])
    raise ConfigError(
        f"the checkpoint was trained with {len(before)} classes, and there are {len(now)} now. The model's output {number} was "
        f"{was or 'not there'} and would be {is_now or 'not there'}. Resume with the classes that it had"
    )
