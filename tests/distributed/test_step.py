"""What the step refuses, and how it says so."""

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
from tests.distributed.pool import RankPool
from tests.tasks import Ragged


class Poisoned(Ragged):
    """Sample 17 makes the loss infinite."""

    def train_data(self) -> list[Tensor]:
        data = super().train_data()
        data[17] = torch.cat([torch.tensor([28, 28, 28]), data[17]])
        return data

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        loss = super().loss(model, batch)
        bad = (batch["ids"][:, :3] == 28).all(dim=1).any()
        return Loss(loss.sum * (math.inf if bad else 1.0), loss.count)


class InfiniteLossFiniteGradient(Ragged):
    """On rank 1 the loss is infinite by a constant, so that no gradient shows it."""

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        import os

        loss = super().loss(model, batch)
        return Loss(loss.sum + (math.inf if os.environ.get("RANK") == "1" else 0.0), loss.count)


class Miscounted(Ragged):
    def count(self, batch: dict[str, Tensor]) -> int:
        return super().count(batch) + 1


class Unmoved(Ragged):
    """The loss does not depend on the model."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.requires_grad_(False)
        self.extra = nn.Parameter(torch.zeros(1))
        model.unused = nn.Parameter(torch.zeros(1))
        return model

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        return Loss((self.extra * 0).sum(), (batch["ids"][:, 1:] >= 0).sum())


def config(task: type) -> str:
    return f"task: tests.distributed.test_step:{task.__name__}\ntraining: {{batch_size: 4}}\n"


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_a_loss_that_is_not_finite_stops_the_run_with_step_rank_and_samples(
    ranks: RankPool, tmp_path: Path, strategy: str
) -> None:
    size = 1 if strategy == "single" else 2
    batches = ranks.run(
        size, work.train, "task: tests.tasks:Ragged\ntraining: {batch_size: 4}\n", [f"training.strategy={strategy}"]
    )
    step, rank = next(
        (step, rank) for rank, result in enumerate(batches) for step, ids in enumerate(result["ids"]) if 17 in ids
    )
    with pytest.raises(AssertionError) as failure:
        ranks.run(size, work.train, config(Poisoned), [f"training.strategy={strategy}", f"run_dir={tmp_path}"])
    samples = ", ".join(map(str, batches[rank]["ids"][step]))
    assert f"step {step + 1}: the loss is not finite on rank {rank}, samples {samples}." in str(failure.value)
    assert "training.on_nonfinite: skip" in str(failure.value)
    (line,) = (tmp_path / BAD_SAMPLES).read_text().splitlines()
    expected = {"what": "loss", "did": "stop", "step": step + 1, "epoch": 0, "rank": rank, "loss": "inf"}
    assert json.loads(line) == {**expected, "samples": batches[rank]["ids"][step]}


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_a_bad_step_is_left_out_on_request_and_the_run_goes_on(ranks: RankPool, tmp_path: Path, strategy: str) -> None:
    size = 1 if strategy == "single" else 2
    overrides = [f"training.strategy={strategy}", "training.on_nonfinite=skip", "training.max_epochs=2"]
    overrides.append(f"run_dir={tmp_path}")
    for result in ranks.run(size, work.train, config(Poisoned), overrides):
        assert result["skipped"] == 2  # once in each epoch
        assert all(torch.isfinite(weight).all() for weight in result["weights"].values())


def test_an_infinite_loss_that_no_gradient_shows_is_agreed_on_at_the_next_step(ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"step 1: the loss is not finite on rank 1, samples \d+") as failure:
        ranks.run(2, work.train, config(InfiniteLossFiniteGradient), ["training.strategy=ddp", f"run_dir={tmp_path}"])
    assert str(failure.value).count("step 1: the loss is not finite on rank 1") == 2, "both ranks stop, with one reason"


def test_a_count_that_the_loss_contradicts_is_refused(ranks: RankPool) -> None:
    with pytest.raises(AssertionError, match=r"loss\(\) counted \d+, but its count\(batch\) said \d+ beforehand"):
        ranks.run(1, work.train, config(Miscounted), ["training.strategy=single"])


class UnusedParameters(Ragged):
    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.never_called = nn.Linear(3, 3)
        return model


class BareTensor(Ragged):
    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Any:
        return super().loss(model, batch).sum


class NotReduced(Ragged):
    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        loss = super().loss(model, batch)
        return Loss(loss.sum.expand(2), loss.count)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (BareTensor, r"step 1: the task's loss\(\) returned Tensor, not a Loss\(sum, count\)"),
        (NotReduced, r"step 1: the task's loss\(\) has a sum of shape \(2,\); it must be a single number"),
    ],
)
def test_a_loss_that_is_no_sum_and_count_is_refused(ranks: RankPool, task: type, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        ranks.run(1, work.train, config(task), ["training.strategy=single"])


def test_parameters_without_gradient_are_named_as_the_cause_and_allowed_on_request(ranks: RankPool) -> None:
    with pytest.raises(
        AssertionError, match=r"never_called.weight, never_called.bias.\n  Set training.ddp.find_unused"
    ):
        ranks.run(2, work.train, config(UnusedParameters), ["training.strategy=ddp"])
    allowed = ["training.strategy=ddp", "training.ddp.find_unused_parameters=true"]
    expected = ranks.run(
        1, work.train, config(UnusedParameters), ["training.strategy=single", "training.batch_size=8"]
    )[0]
    for overrides in (allowed, ["training.strategy=fsdp"]):
        result = ranks.run(2, work.train, config(UnusedParameters), overrides)[0]
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-5)


class UnusedOnBothStages(Ragged):
    """A layer in the first block and one in the last that are never called: each belongs to another stage."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.layers[0].idle = nn.Linear(3, 3)  # type: ignore[index, union-attr]
        model.layers[-1].idle = nn.Linear(3, 3, bias=False)  # type: ignore[index, union-attr]
        return model


def test_parameters_without_gradient_are_named_for_all_stages_of_a_pipeline(ranks: RankPool) -> None:
    pipeline = ["training.strategy=pipeline", "training.gradient_accumulation=2", "training.batch_size=2"]
    everywhere = "layers.0.idle.weight, layers.0.idle.bias, layers.2.idle.weight"
    with pytest.raises(AssertionError, match=rf"3 parameter\(s\) got no gradient, .* {everywhere}.\n  Register them"):
        ranks.run(2, work.train, config(UnusedOnBothStages), pipeline)


def test_an_infinite_loss_in_the_last_step_is_not_saved(ranks: RankPool, tmp_path: Path) -> None:
    last = ["training.strategy=ddp", "training.max_steps=1", f"run_dir={tmp_path}"]
    with pytest.raises(AssertionError, match="step 1: the loss is not finite on rank 1"):
        ranks.run(2, functools.partial(work.train, save=True), config(InfiniteLossFiniteGradient), last)
    assert not list(tmp_path.glob("checkpoints/step-*"))


class ValidationOnRankZero(Ragged):
    def valid_data(self) -> Any:
        import os

        return super().valid_data() if os.environ["RANK"] == "0" else None


def test_ranks_that_see_different_data_are_told_before_they_wait_for_each_other(ranks: RankPool) -> None:
    with pytest.raises(AssertionError, match=r"data of different sizes .*\(53, 11\), \(53, None\)"):
        ranks.run(2, work.train, config(ValidationOnRankZero), ["training.strategy=ddp"])


class TensorCount(Ragged):
    def count(self, batch: dict[str, Tensor]) -> Any:
        return (batch["ids"][:, 1:] >= 0).sum()


def test_a_count_may_be_a_tensor(ranks: RankPool) -> None:
    plain = ranks.run(
        1, work.train, "task: tests.tasks:Ragged\ntraining: {batch_size: 4}\n", ["training.strategy=single"]
    )
    assert (
        ranks.run(1, work.train, config(TensorCount), ["training.strategy=single"])[0]["losses"] == plain[0]["losses"]
    )


def test_static_graph_with_accumulation_is_refused(ranks: RankPool) -> None:
    overrides = ["training.strategy=ddp", "training.ddp.static_graph=true", "training.gradient_accumulation=2"]
    with pytest.raises(AssertionError, match="static_graph does not go with gradient accumulation"):
        ranks.run(2, work.train, config(Ragged).replace("test_step:Ragged", "test_step:Poisoned"), overrides)


def test_a_metric_that_does_not_exist_cannot_decide_what_is_best(ranks: RankPool) -> None:
    text = "task: tests.tasks:Ragged\ntraining: {monitor: accuracy}\n"
    with pytest.raises(
        AssertionError, match=r"training.monitor: 'accuracy' is not a metric of this task; there is loss"
    ):
        ranks.run(2, work.with_session, text, [], _evaluate)


def test_a_loss_without_gradient_is_refused(ranks: RankPool) -> None:
    with pytest.raises(AssertionError, match="no parameter got a gradient"):
        ranks.run(1, work.train, config(Unmoved), ["training.strategy=single"])


def test_one_rank_asking_to_stop_stops_all_before_the_same_step(ranks: RankPool) -> None:
    results = ranks.run(
        2, work.with_session, "task: tests.tasks:Ragged\ntraining: {batch_size: 2}\n", [], _stop_on_rank_one
    )
    assert results == [3, 3]


def _stop_on_rank_one(session: Any) -> int:
    for batch in session.batches():
        if session.step(batch).stopped:
            break
        session.stop_requested = session.world.rank == 1 and session.steps_done == 3
    return session.steps_done


def test_evaluation_counts_each_sample_once_on_any_number_of_ranks(ranks: RankPool) -> None:
    text = "task: tests.tasks:Ragged\ntraining: {batch_size: 3}\n"
    expected = ranks.run(1, work.with_session, text, ["training.strategy=single"], _evaluate)[0]
    for size in (2, 3, 4):
        for strategy in ("ddp", "fsdp"):
            for metrics in ranks.run(size, work.with_session, text, [f"training.strategy={strategy}"], _evaluate):
                assert metrics == pytest.approx(expected, rel=1e-6)


def _evaluate(session: Any) -> dict[str, float]:
    return session.evaluate()


def test_the_wrong_number_of_ranks_is_refused(ranks: RankPool) -> None:
    with pytest.raises(AssertionError, match=r"training.num_gpus: 3, but 2 rank\(s\) were started"):
        ranks.run(2, work.train, "task: tests.tasks:Ragged\n", ["training.num_gpus=3"])


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_gradients_are_reduced_on_the_last_micro_batch_only(ranks: RankPool, strategy: str) -> None:
    text = "task: tests.tasks:Ragged\n"
    counts = []
    for batch_size, accumulation in ((6, 1), (2, 3)):
        overrides = [
            f"training.strategy={strategy}",
            f"training.batch_size={batch_size}",
            f"training.gradient_accumulation={accumulation}",
        ]
        counts.append(ranks.run(2, work.with_session, text, overrides, _reductions_in_a_step)[0])
    assert counts[0] == counts[1] > 0


def _reductions_in_a_step(session: Any) -> int:
    """How often the step calls the collective that carries gradients (under ddp, the agreement is one such call too)."""
    from torch.profiler import profile

    collective = "c10d::allreduce_" if session.strategy.name == "ddp" else "c10d::_reduce_scatter_base_"
    batches = iter(session.batches())
    session.step(next(batches))  # DDP builds its buckets anew after the first step
    with profile() as record:
        session.step(next(batches))
    return sum(event.count for event in record.key_averages() if event.key == collective)


class FloatMetric(Ragged):
    def evaluate(self, model: nn.Module, batch: dict[str, Tensor]) -> Any:
        return {"loss": 1.0}


class NotATask:
    pass


class NoLoss(Task):
    def train_data(self) -> Any:
        return []

    def build_model(self) -> nn.Module:
        return nn.Linear(1, 1)


class AnIterator(Ragged):
    def train_data(self) -> Any:
        return iter(super().train_data())


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (FloatMetric, r"evaluate\(\) gave float for 'loss', not a Loss\(sum, count\)"),
        (NotATask, "NotATask is not a subclass of shardwise.Task"),
        (NoLoss, "NoLoss has no loss"),
        (AnIterator, "data must have a length and be read by index, unlike list_iterator"),
    ],
)
def test_a_task_that_is_not_one_is_answered(ranks: RankPool, task: type, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        ranks.run(1, work.with_session, config(task), ["training.strategy=single"], _evaluate)


class UnseededData(Ragged):
    def train_data(self) -> list[Tensor]:
        return [torch.randint(0, 29, (9,)) for _ in range(10)]


def test_data_that_a_task_makes_at_random_is_the_same_on_every_rank(ranks: RankPool) -> None:
    first, second = ranks.run(2, work.with_session, config(UnseededData), ["training.strategy=ddp"], _data)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def _data(session: Any) -> list[Tensor]:
    return session.train_data


class HungryModel(Ragged):
    def build_model(self) -> nn.Module:
        return nn.Linear(2**30, 2**30)


class HungryEvaluation(Ragged):
    def evaluate(self, model: nn.Module, batch: dict[str, Tensor]) -> Any:
        return {"loss": Loss(torch.empty(2**60, dtype=torch.uint8).sum(), 1)}


@pytest.mark.parametrize(
    ("task", "where"), [(HungryModel, "while the run was prepared"), (HungryEvaluation, "evaluation after step 0")]
)
def test_running_out_of_memory_says_what_the_run_was_doing(ranks: RankPool, task: type, where: str) -> None:
    with pytest.raises(AssertionError, match=f"OutOfMemory: {where}: out of memory: .* were asked for"):
        ranks.run(1, work.with_session, config(task), ["training.strategy=single"], _evaluate)
