"""Numbers gone bad in a run: skipped, rolled back, recorded; on any number of ranks and interrupted or not."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.engine.loss_guard import BAD_SAMPLES
from shardwise.tasks import Loss, Task
from tests.distributed import work
from tests.distributed.pool import FreshRanks, RankPool
from tests.tasks import Ragged

TEXT = """
task: tests.distributed.test_loss_guard:{task}
name: numbers
training: {{batch_size: 3, max_epochs: 2, optimizer: {{lr: 0.01}}, checkpoint_every_n_steps: 3, log_every_n_steps: 1}}
"""
LENGTH = 39
"""Of a sequence that is longer than any other: so that a batch knows its bad sample."""


class Poisoned(Ragged):
    """Sample 17 makes the loss infinite."""

    factor = math.inf

    def train_data(self) -> list[Tensor]:
        data = super().train_data()
        data[17] = torch.arange(LENGTH + 5) % 29
        return data

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        loss = super().loss(model, batch)
        return Loss(loss.sum * (self.factor if batch["ids"].shape[1] > LENGTH + 1 else 1.0), loss.count)


class Jumping(Poisoned):
    """The loss, and with it the gradient, is a thousand times what it should be."""

    factor = 1000.0


def options(strategy: str, folder: Path, *more: str) -> list[str]:
    return [f"training.strategy={strategy}", f"run_dir={folder}", *more]


def bad_samples(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / BAD_SAMPLES).read_text().splitlines()]


def assert_same_weights(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    for name, weight in a.items():
        assert torch.equal(weight, b[name]), name


@pytest.mark.parametrize(("strategy", "size"), [("single", 1), ("ddp", 2), ("zero1", 2), ("fsdp", 2), ("local_sgd", 2)])
def test_a_rolled_back_run_equals_one_that_never_saw_the_batch(
    ranks: RankPool, tmp_path: Path, strategy: str, size: int
) -> None:
    text = TEXT.format(task="Poisoned")
    overrides = options(strategy, tmp_path / "a", "training.on_nonfinite=rollback")
    rolled = ranks.run(size, work.with_session, text, overrides, _train)[0]
    assert rolled["rollbacks"] == 2 and len(rolled["skipped_batches"]) == 2, "once in each epoch"
    overrides = options(strategy, tmp_path / "b")
    clean = ranks.run(size, work.with_session, text, overrides, _train, rolled["skipped_batches"])[0]
    assert clean["rollbacks"] == 0
    assert rolled["steps"] == clean["steps"] and rolled["skipped"] == clean["skipped"] == 2
    assert_same_weights(rolled["weights"], clean["weights"])
    records = bad_samples(tmp_path / "a")
    assert [record["epoch"] for record in records] == [0, 1]
    assert all(17 in record["samples"] and len(record["samples"]) <= 3 for record in records)
    assert all((record["what"], record["did"], record["loss"]) == ("loss", "rollback", "inf") for record in records)


@pytest.mark.parametrize("strategy", ["pipeline", "tensor"])
def test_where_ranks_share_one_copy_of_the_model_they_go_back_together(
    fresh_ranks: FreshRanks, tmp_path: Path, strategy: str
) -> None:
    text = TEXT.format(task="Poisoned")
    few = ["training.gradient_accumulation=2", "training.max_epochs=1", "model.tied=false"]
    overrides = options(strategy, tmp_path / "a", "training.on_nonfinite=rollback", *few)
    rolled = fresh_ranks.run(2, work.with_session, text, overrides, _train)[0]
    assert rolled["rollbacks"] == 1
    clean = fresh_ranks.run(
        2, work.with_session, text, options(strategy, tmp_path / "b", *few), _train, rolled["skipped_batches"]
    )
    assert clean[0]["rollbacks"] == 0
    assert_same_weights(rolled["weights"], clean[0]["weights"])
    (record,) = bad_samples(tmp_path / "a")
    assert 17 in record["samples"] and len(record["samples"]) <= 3, "those of one micro-batch"


def _train(session: Any, skipped_batches: Any = (), until: int | None = None) -> dict[str, Any]:
    session.state.skipped_batches = list(skipped_batches)
    session.resume("auto")
    if not session.steps_done:
        session.save()
    rollbacks, troubles = 0, []
    for batch in session.batches():
        result = session.step(batch)
        rollbacks += result.rollback
        troubles += [result.trouble] if result.trouble else []
        if session.steps_done % 4 == 0 and not result.rollback:
            session.save()
        if session.steps_done == until:
            break
    return {
        "rollbacks": rollbacks,
        "skipped_batches": session.state.skipped_batches,
        "steps": session.steps_done,
        "skipped": session.skipped_steps,
        "weights": work.full_weights(session),
        "troubles": troubles,
    }


def test_a_resumed_run_leaves_out_what_was_left_out_before(ranks: RankPool, tmp_path: Path) -> None:
    text = TEXT.format(task="Poisoned")
    more = ["training.on_nonfinite=rollback", "training.max_rollbacks=2"]
    whole = ranks.run(2, work.with_session, text, options("ddp", tmp_path / "whole", *more), _train)[0]
    # Interrupted in the second epoch, after the rollback of the first one was saved.
    parts = options("ddp", tmp_path / "parts", *more)
    head = ranks.run(2, work.with_session, text, parts, _train, (), 13)[0]
    assert head["rollbacks"] >= 1
    tail = ranks.run(2, work.with_session, text, parts, _train)[0]
    assert tail["skipped_batches"] == whole["skipped_batches"]
    assert_same_weights(tail["weights"], whole["weights"])


def test_after_too_many_rollbacks_the_run_stops_and_says_so(ranks: RankPool, tmp_path: Path) -> None:
    overrides = options("ddp", tmp_path, "training.on_nonfinite=rollback", "training.max_rollbacks=1")
    with pytest.raises(AssertionError, match=r"gone back 1 time\(s\) already") as failure:
        ranks.run(2, work.with_session, TEXT.format(task="Poisoned"), overrides, _train)
    assert str(failure.value).count("gone back 1 time(s)") == 2, "every rank stops, with one reason"


def test_without_a_checkpoint_a_rollback_says_what_is_missing(ranks: RankPool, tmp_path: Path) -> None:
    overrides = options("single", tmp_path, "training.on_nonfinite=rollback")
    with pytest.raises(AssertionError, match="There is no whole checkpoint to go back to"):
        ranks.run(1, work.train, TEXT.format(task="Poisoned"), overrides)


@pytest.mark.parametrize(("strategy", "size"), [("single", 1), ("ddp", 2)])
@pytest.mark.parametrize("act", ["skip", "rollback", "stop"])
def test_a_loss_spike_is_dealt_with_before_the_update(
    ranks: RankPool, tmp_path: Path, act: str, strategy: str, size: int
) -> None:
    """20 steps must have been seen first: the bad sample of the first epoch comes too early, that of the third does not."""
    text = TEXT.format(task="Jumping")
    overrides = options(strategy, tmp_path, f"training.on_spike={act}", "training.max_epochs=3", "data.samples=60")
    if act == "stop":
        with pytest.raises(AssertionError, match=r"the loss jumped to .*, above .*, on rank \d, samples .*17"):
            ranks.run(size, work.with_session, text, overrides, _train)
    else:
        found = ranks.run(size, work.with_session, text, overrides, _train)[0]
        assert found["skipped"] >= 1 and any("the loss jumped to" in trouble for trouble in found["troubles"])
        assert found["rollbacks"] == (found["skipped"] if act == "rollback" else 0)
    assert all(17 in record["samples"] and record["what"] == "spike" for record in bad_samples(tmp_path))


def test_spikes_are_told_alike_whether_the_run_was_interrupted_or_not(ranks: RankPool, tmp_path: Path) -> None:
    text = TEXT.format(task="Jumping")
    more = ["training.on_spike=skip", "training.max_epochs=3", "data.samples=60"]
    whole = ranks.run(2, work.with_session, text, options("ddp", tmp_path / "whole", *more), _train)[0]
    parts = options("ddp", tmp_path / "parts", *more)
    ranks.run(2, work.with_session, text, parts, _train, (), 17)
    tail = ranks.run(2, work.with_session, text, parts, _train)[0]
    assert tail["skipped"] == whole["skipped"] >= 1
    assert_same_weights(tail["weights"], whole["weights"])


def test_under_fp16_a_skipped_spike_leaves_the_loss_scale_usable(ranks: RankPool, tmp_path: Path) -> None:
    more = ["training.on_spike=skip", "training.max_epochs=3", "data.samples=60", "training.precision=16-mixed"]
    found = ranks.run(1, work.with_session, TEXT.format(task="Jumping"), options("single", tmp_path, *more), _train)[0]
    assert any("the loss jumped to" in trouble for trouble in found["troubles"])
    assert all(torch.isfinite(weight).all() for weight in found["weights"].values())


class Normed(Task):
    """A model with batch norm, and a sample that is no number."""

    bad = 5

    def train_data(self) -> Any:
        points = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
        if self.bad is not None:
            points[self.bad] = math.nan
        return points

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def loss(self, model: nn.Module, batch: Tensor) -> Loss:
        return Loss(model(batch).square().sum(), len(batch))


@pytest.mark.parametrize(("strategy", "size"), [("single", 1), ("ddp", 2), ("fsdp", 2)])
def test_a_skipped_step_leaves_the_statistics_of_batch_norm_as_they_were(
    ranks: RankPool, tmp_path: Path, strategy: str, size: int
) -> None:
    overrides = options(strategy, tmp_path, "training.on_nonfinite=skip", f"training.batch_size={4 // size}")
    for counted, finite, skipped in ranks.run(
        size, work.with_session, TEXT.format(task="Normed"), overrides, _statistics
    ):
        assert skipped == 2
        assert finite
        assert counted == 4, "of 6 steps, those that were kept"


def _statistics(session: Any) -> tuple[int, bool, int]:
    for batch in session.batches():
        session.step(batch)
    state = session.parts.strategy.module.state_dict()
    finite = all(bool(state[f"1.running_{name}"].isfinite().all()) for name in ("mean", "var"))
    return int(state["1.num_batches_tracked"]), finite, session.skipped_steps


def test_powersgd_forgets_what_a_bad_gradient_left_in_its_memory(ranks: RankPool, tmp_path: Path) -> None:
    more = ["training.on_nonfinite=skip", "training.ddp.comm_hook=powersgd", "training.ddp.powersgd_warmup_steps=2"]
    overrides = options("ddp", tmp_path, *more, "training.max_epochs=3")
    for result in ranks.run(2, work.train, TEXT.format(task="Poisoned"), overrides):
        assert result["skipped"] == 3, "once in each epoch, and not from there on"
        assert all(torch.isfinite(weight).all() for weight in result["weights"].values())


def test_train_rolls_back_says_so_and_logs_every_step_once(ranks: RankPool, tmp_path: Path) -> None:
    text = TEXT.format(task="Poisoned")
    overrides = ["training.strategy=ddp", "training.on_nonfinite=rollback"]
    job = functools.partial(work.run_fit)
    output = ranks.run(2, job, text, overrides, str(tmp_path))[0]["output"]
    assert "the loss is not finite on rank" in output and "this global batch is left out" in output
    assert output.count("left out since a rollback: step skipped") == 2
    run = tmp_path / "runs" / "numbers"
    for file in (run / "metrics.jsonl", run / "ranks" / "rank-0000.jsonl", run / "ranks" / "rank-0001.jsonl"):
        records = [json.loads(line) for line in file.read_text().splitlines()]
        steps = [each["step"] for each in records if "eval" not in each and "checkpoint" not in each]
        assert steps == list(range(1, 19)), file.name
    again = ranks.run(2, functools.partial(work.run_fit, resume="auto"), text, overrides, str(tmp_path))[0]
    assert "nothing was left to do" in again["output"]
