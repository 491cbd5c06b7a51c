"""training.monitor: a name that no evaluation can have is told before the run, or as early as it can be known."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise import Session
from shardwise.tasks import Loss
from shardwise.tasks.chess.task import ChessTask
from tests.cli.program import shardwise
from tests.distributed import work
from tests.distributed.pool import RankPool
from tests.tasks import Ragged

GRADED = "task: tests.distributed.test_monitor:Graded\ntraining: {batch_size: 4, monitor: grades}\n"


class Graded(Ragged):
    """What its evaluation gives shows when it is made."""

    def evaluate(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Loss]:
        return {"loss": self.loss(model, batch), "grade": Loss(torch.tensor(1.0), 1)}


def test_a_metric_that_only_an_evaluation_shows_is_looked_for_in_the_first_one(ranks: RankPool) -> None:
    told = "training.monitor: 'grades' is not a metric of this task; there is grade, loss. Nearest: grade"
    text = GRADED
    with pytest.raises(AssertionError, match=re.escape(told)):
        ranks.run(2, work.with_session, text, [], _evaluate)


def test_after_a_step_a_wrong_monitor_is_said_once_and_training_goes_on(ranks: RankPool) -> None:
    text = GRADED
    said = ranks.run(2, work.with_session, text, [], _steps_and_evaluations)
    assert [len(each) for each in said] == [1, 0], "rank 0 speaks, once"
    assert "Nearest: grade. Training goes on; while there is none, no checkpoint counts as the best" in said[0][0]


def _steps_and_evaluations(session: Session) -> list[str]:
    said: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardwise").addHandler(listener)
    try:
        for batch in session.batches():
            session.step(batch)
            assert session.evaluate()
            if session.steps_done == 2:
                break
    finally:
        logging.getLogger("shardwise").removeHandler(listener)
    return said


class Inherited(ChessTask):
    """Its names are more than those that the class above it names."""

    def derived_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        return {**super().derived_metrics(metrics), "mine": 0.0}


@pytest.mark.parametrize(
    ("task", "monitor", "nearest"),
    [("chess", "next_move_acuracy", "next_move_accuracy"), ("images", "acuracy", "accuracy"), ("cells", "knn", None),
     ("segmentation", "dize", "dice"), ("tests.distributed.test_monitor:Plain", "los", "loss")],
)  # fmt: skip
def test_a_monitor_that_the_task_cannot_have_is_refused_before_the_run(
    task: str, monitor: str, nearest: str | None, tmp_path: Path
) -> None:
    small = {
        "images": "num_images: 40",
        "cells": "num_cells: 60",
        "segmentation": "num_subjects: 4",
        "chess": "num_games: 9",
    }
    (tmp_path / "a.yaml").write_text(
        f"task: {task}\ndata: {{{small.get(task, '')}}}\ntraining: {{monitor: {monitor}}}\n"
    )
    done = shardwise(tmp_path, "config", "show", "a.yaml")
    assert done.returncode == 2 and done.stdout == ""
    assert f"training.monitor: '{monitor}' is not a metric of this task; there is loss" in done.stderr
    assert ("Nearest" in done.stderr) == (nearest is not None) and (nearest or "") in done.stderr


class Plain(Ragged):
    """Evaluates its loss, as every task does that says nothing else."""


def test_a_class_below_that_adds_metrics_is_not_held_to_the_names_above_it(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        "task: tests.distributed.test_monitor:Inherited\ndata: {num_games: 9}\ntraining: {monitor: mine}\n"
    )
    assert shardwise(tmp_path, "config", "show", "a.yaml").returncode == 0


def _evaluate(session: Any) -> dict[str, float]:
    return session.evaluate()
