"""The one seam to look into a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise import Observer, Session
from shardwise.config import Config
from shardwise.data import GlobalOrder
from shardwise.engine.observers import Rehearsal, observing
from shardwise.errors import ShardwiseError
from shardwise.tasks import Task
from tests.tasks import Ragged, config_of

TEXT = "task: tests.tasks:Ragged\ntraining: {strategy: single, batch_size: 27, gradient_clip: 0.001, max_epochs: 1}\n"


class Notes(Observer):
    """Writes down what it was told, and what the run had done by then."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def prepared(self, run: Any) -> None:
        self.told.append(f"prepared {run.strategy.name}")

    def resumed(self, run: Any, path: Path) -> None:
        self.told.append(f"resumed {path.name} at {run.steps_done}")

    def before_step(self, run: Any, batch: Any) -> None:
        self.told.append(f"before step {run.steps_done + 1} of {run.total_steps}")

    def gradients_ready(self, run: Any) -> None:
        self.told.append("gradients ready")

    def after_step(self, run: Any, batch: Any, result: Any) -> None:
        self.told.append(f"after step {result.step}, {len(batch.ids)} samples")

    def evaluated(self, run: Any, metrics: dict[str, float]) -> None:
        self.told.append(f"evaluated {sorted(metrics)}")

    def saved(self, run: Any, written: Any) -> None:
        self.told.append(f"saved {written.step}")

    def closing(self, run: Any) -> None:
        self.told.append(f"closing after {run.steps_done}")


def test_a_run_is_told_from_its_beginning_to_its_end(tmp_path: Path) -> None:
    notes, config = Notes(), config_of(TEXT, [f"run_dir={tmp_path}"])
    with Session(config, observers=[notes]) as session:
        session.prepare()
        batches = session.batches()
        session.step(next(batches))
        session.evaluate()
        session.save()
        session.wait()
        batches.close()
    assert notes.told == [
        "prepared single",
        "before step 1 of 2",
        "gradients ready",
        "after step 1, 27 samples",
        "evaluated ['loss']",
        "saved 1",
        "closing after 1",
    ]
    with Session(config, observers=[notes]) as session:
        notes.told.clear()
        session.prepare()
        session.resume()
        for batch in session.batches():
            session.step(batch)
    expected = ["prepared single", "resumed step-00000001 at 1", "before step 2 of 2", "gradients ready"]
    assert notes.told == [*expected, "after step 2, 26 samples", "closing after 2"]


class Looks(Observer):
    """At gradients and weights, before the update."""

    def gradients_ready(self, run: Any) -> None:
        grads = [run.strategy.gradient_of(each) for each in run.parts.parameters]
        self.norm = float(torch.stack([grad.norm() for grad in grads if grad is not None]).norm())
        self.weights = [each.detach().clone() for each in run.parts.parameters]


def test_gradients_are_seen_whole_before_they_are_clipped_and_any_weight_has_changed(tmp_path: Path) -> None:
    looks = Looks()
    with Session(config_of(TEXT, [f"run_dir={tmp_path}"]), observers=[looks]) as session:
        session.prepare()
        before = [each.detach().clone() for each in session.parts.parameters]
        result = session.step(next(session.batches()))
        assert result.grad_norm == pytest.approx(looks.norm, rel=1e-6) and looks.norm > 0.001, (
            "it was clipped afterwards"
        )
        assert all(torch.equal(a, b) for a, b in zip(before, looks.weights, strict=True))
        assert not all(torch.equal(a, b) for a, b in zip(before, session.parts.parameters, strict=True))


class Failing(Ragged):
    def loss(self, model: Any, batch: Any) -> Any:
        raise RuntimeError("code 77")


class Explains(Observer):
    def step_failed(self, run: Any, error: Exception) -> None:
        if "code 77" in str(error):
            raise ShardwiseError(f"step {run.steps_done + 1}: the device was unplugged") from error


def test_an_observer_may_say_more_clearly_why_a_step_failed(tmp_path: Path) -> None:
    text = TEXT.replace("tests.tasks:Ragged", f"{__name__}:Failing")
    for observers, said in (([Notes()], "code 77"), ([Notes(), Explains()], "step 1: the device was unplugged")):
        with (
            pytest.raises(Exception, match=said),
            Session(config_of(text, [f"run_dir={tmp_path}"]), observers=observers) as s,
        ):
            s.prepare()
            s.step(next(s.batches()))


class First(GlobalOrder):
    """The first samples of an order alone."""

    def __init__(self, whole: GlobalOrder) -> None:
        super().__init__(5, whole.seed)
        self.whole = whole

    def part(self, epoch: int, begin: int, end: int) -> Any:
        return self.whole.part(epoch, begin, end)


class Trial(Rehearsal):
    def config(self, config: Config) -> Config:
        return config.model_copy(update={"seed": 11})

    def task(self, run: Any, task: Task) -> tuple[Task, Any]:
        self.built = task
        return task, (task.train_data(), None)

    def order(self, order: GlobalOrder) -> GlobalOrder:
        return First(order)

    def before_first_batch(self, run: Any) -> None:
        self.began = run.steps_done


def test_a_rehearsal_reaches_the_sessions_of_a_program_that_knows_nothing_of_it(tmp_path: Path) -> None:
    def program() -> tuple[int, list[int]]:
        with Session(config_of(TEXT, [f"run_dir={tmp_path}"])) as session:
            session.prepare()
            return session.config.seed, next(session.batches()).ids

    trial = Trial()
    with observing(trial):
        seed, ids = program()
    assert (seed, len(ids), trial.began, type(trial.built).__name__) == (11, 5, 0, "Ragged")
    assert program()[0] == 0, "and no others"
