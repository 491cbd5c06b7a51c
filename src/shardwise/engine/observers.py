"""The one seam to look into a run. The log, verify, drill, CUDA graphs and callbacks of your own are observers.

class Norms(Observer):
    def after_step(self, run, batch, result):
        print(result.step, result.grad_norm)

Session("chess.yaml", observers=[Norms()])

Every rank calls them, in the order in which they were given, at the same places: so they may use collectives, if all ranks do.
What they raise ends the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardwise.checkpoint import Written
from shardwise.config import Config
from shardwise.data import GlobalOrder, StepBatch
from shardwise.data.loader import MicroBatch
from shardwise.engine.run import Run
from shardwise.engine.step_result import StepResult
from shardwise.tasks import Loss, Rows, Task

Data = tuple[Any, Any]
"""To train on, and to validate with."""


class Observer:
    """Override what you want to see."""

    def prepared(self, run: Run) -> None:
        """Model, optimizer and data are there."""

    def resumed(self, run: Run, path: Path) -> None:
        """The run goes on from this checkpoint."""

    def before_step(self, run: Run, batch: StepBatch) -> None:
        """Step `run.steps_done + 1` is about to be made."""

    def gradients_ready(self, run: Run) -> None:
        """All passes of a step are made and its gradients reduced (`run.strategy.gradient_of(parameter)`). They are not clipped
        yet, and no weight has changed."""

    def after_step(self, run: Run, batch: StepBatch, result: StepResult) -> None:
        """A step was made, skipped, undone by a rollback, or, if `result.stopped`, not begun. On a GPU it may still be under
        way: to ask for its numbers makes the host wait for it."""

    def step_failed(self, run: Run, error: Exception) -> None:
        """A step raised this, which is raised on unless the observer raises a clearer one."""

    def batch_evaluated(self, run: Run, micro: MicroBatch, results: Mapping[str, Loss | Rows]) -> None:
        """What the task's evaluate() gave for this rank's micro-batch. `micro.request.borrowed`: another rank counts it."""

    def evaluated(self, run: Run, metrics: dict[str, float]) -> None:
        """On all validation data."""

    def saved(self, run: Run, written: Written) -> None:
        """A checkpoint is in place, or could not be written. Told at the next step after it."""

    def closing(self, run: Run) -> None:
        """The run has come to its end; the ranks are still together."""


class Rehearsal(Observer):
    """An observer that also decides what is trained: for proofs, which train the user's own program on a few chosen samples."""

    checks_loss: bool = False
    """Whether the first step asks if the loss is a sum (loss_check.py), as it does in every run that is not rehearsed."""

    def config(self, config: Config) -> Config:
        """Before anything is made of it."""
        return config

    def task(self, run: Run, task: Task) -> tuple[Task, Data | None]:
        """That or another, and its data (training, validation) where they are there already."""
        return task, None

    def order(self, order: GlobalOrder) -> GlobalOrder:
        """In which samples come."""
        return order

    def valid_order(self, order: GlobalOrder) -> GlobalOrder:
        """In which samples are evaluated."""
        return order

    def before_first_batch(self, run: Run) -> None:
        """The loop begins."""


_WATCHING: list[Observer] = []


def all_observers(own: Iterable[Observer]) -> list[Observer]:
    """Those of a session that begins now."""
    return [*own, *_WATCHING]


@contextmanager
def observing(*observers: Observer) -> Iterator[None]:
    """Every session that is begun within it has these observers too: that of a user's program, for example."""
    _WATCHING.extend(observers)
    try:
        yield
    finally:
        for each in observers:
            _WATCHING.remove(each)
