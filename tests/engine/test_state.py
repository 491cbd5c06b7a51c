"""All that a run must remember is one value, which a checkpoint writes and a resume returns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.data import Cursor
from shardwise.engine.loss_guard import LossHistory
from shardwise.engine.session import Session
from shardwise.engine.state import RunState
from shardwise.errors import CheckpointError
from tests.tasks import config_of

STATE = RunState(
    step=41, cursor=Cursor(2, 17), skipped_steps=3, metric=0.5, best_metric=0.25, scaler={"scale": 1024.0},
    skipped_batches=[(0, 12), (1, 36)], recent_losses=LossHistory([3.0, 2.5]), global_batch=12, samples=53, seed=7,
    order="shuffled",
)  # fmt: skip


def test_what_is_written_is_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = json.loads(json.dumps(STATE.as_plain()))
    monkeypatch.setattr("shardwise.engine.state.read_manifest", lambda folder: {"about": plain})
    read = RunState.of_checkpoint(tmp_path)
    assert read.as_plain() == STATE.as_plain()
    assert (read.cursor, read.skipped_batches) == (STATE.cursor, STATE.skipped_batches)
    assert list(read.recent_losses.recent) == [3.0, 2.5]


def test_a_key_that_nobody_knows_is_told_with_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "shardwise.engine.state.read_manifest", lambda folder: {"about": {**STATE.as_plain(), "mood": 1}}
    )
    with pytest.raises(CheckpointError, match=r"was not written by this version of shardwise: .*mood"):
        RunState.of_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("mode", "metrics", "best"),
    [("min", [3.0, 2.0, 2.5], 2.0), ("max", [3.0, 2.0, 2.5], 3.0), ("min", [float("nan")], None)],
)
def test_the_best_metric_is_kept(mode: str, metrics: list[float], best: float | None) -> None:
    state = RunState()
    for metric in metrics:
        state.evaluated(metric, mode)
    assert state.best_metric == best
    state.evaluated(None, mode)
    assert (state.metric, state.best_metric) == (None, best)


def test_a_resumed_session_holds_the_state_that_was_saved(tmp_path: Path) -> None:
    config = config_of(
        "task: tests.tasks:Ragged\ntraining: {strategy: single, batch_size: 20}", [f"run_dir={tmp_path}"]
    )
    with Session(config) as session:
        session.prepare()
        batches = session.batches()
        session.step(next(batches))
        session.step(next(batches))
        session.save({"loss": 1.5})
        saved = session.state.as_plain()
    with Session(config) as session:
        session.prepare()
        session.resume("latest")
        assert session.state.as_plain() == saved
        assert (session.steps_done, session.cursor, session.best_metric) == (2, Cursor(0, 40), 1.5)
