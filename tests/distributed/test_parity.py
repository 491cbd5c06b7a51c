"""Any number of ranks, any accumulation, either strategy: the numbers of one process on the same global batches."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.distributed import work
from tests.distributed.pool import RankPool

# 53 samples in global batches of 12: four whole ones and a tail of 5, which 4 ranks × 3 micro-batches cannot share evenly.
CONFIG = """
task: tests.tasks:Ragged
training:
  gradient_clip: 0.5
  max_epochs: 2
  optimizer: {name: adamw, lr: 0.01, weight_decay: 0.1}
  scheduler: {name: cosine_warmup, warmup_steps: 2}
"""


@pytest.fixture(scope="module")
def reference(_pool: RankPool) -> Any:
    @functools.cache
    def run(global_batch: int) -> dict[str, Any]:
        overrides = [f"training.batch_size={global_batch}", "training.strategy=single"]
        return _pool.run(1, functools.partial(work.train, evaluate=True), CONFIG, overrides)[0]

    return run


def overrides_for(strategy: str, size: int, accumulation: int) -> list[str]:
    return [
        f"training.strategy={strategy}",
        f"training.batch_size={12 // (size * accumulation) or 1}",
        f"training.gradient_accumulation={accumulation}",
    ]


def global_batch(size: int, accumulation: int) -> int:
    return (12 // (size * accumulation) or 1) * size * accumulation


@pytest.mark.parametrize("accumulation", [1, 2, 3])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_and_accumulation_give_the_numbers_of_one_process(
    ranks: RankPool, reference: Any, strategy: str, size: int, accumulation: int
) -> None:
    expected = reference(global_batch(size, accumulation))
    results = ranks.run(
        size, functools.partial(work.train, evaluate=True), CONFIG, overrides_for(strategy, size, accumulation)
    )
    for result in results:
        assert_same_curve(result, expected)
        assert result["metrics"] == pytest.approx(expected["metrics"], rel=1e-5)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_loss_averaged_per_rank_gives_other_numbers(ranks: RankPool, reference: Any, strategy: str) -> None:
    """The mistake that the loss as sum and count prevents: the test above would catch it."""
    wrong = functools.partial(work.train, per_rank_mean=True)
    result = ranks.run(2, wrong, CONFIG, overrides_for(strategy, 2, 2))[0]
    with pytest.raises(AssertionError):
        assert_same_curve(result, reference(12))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_one_rank_under_a_strategy_is_a_single_process(ranks: RankPool, reference: Any, strategy: str) -> None:
    result = ranks.run(1, work.train, CONFIG, overrides_for(strategy, 1, 3))[0]
    assert_same_curve(result, reference(12))


@pytest.mark.parametrize("machines", [1, 2, 4])
def test_hybrid_sharding_gives_the_numbers_of_one_process(ranks: RankPool, reference: Any, machines: int) -> None:
    hybrid = ["training.fsdp.sharding_strategy=HYBRID_SHARD", f"training.num_nodes={machines}"]
    results = ranks.run(4, work.train, CONFIG, [*hybrid, *overrides_for("fsdp", 4, 3)])
    for result in results:
        assert_same_curve(result, reference(12))


def test_more_ranks_than_samples_in_a_batch_take_part_with_nothing(ranks: RankPool, reference: Any) -> None:
    """Global batches of 4 over 4 ranks leave a tail of one sample: three ranks have none."""
    for strategy in ("ddp", "fsdp"):
        results = ranks.run(4, work.train, CONFIG, [f"training.strategy={strategy}", "training.batch_size=1"])
        assert [len(result["ids"][13]) for result in results] == [1, 0, 0, 0]
        assert_same_curve(results[0], reference(4))


@pytest.mark.parametrize("options", ["{min_num_params: 2000}", "{activation_checkpointing: true}"])
def test_fsdp_options_do_not_change_the_numbers(ranks: RankPool, reference: Any, options: str) -> None:
    result = ranks.run(2, work.train, CONFIG, [f"training.fsdp={options}", "training.batch_size=6"])[0]
    assert_same_curve(result, reference(12))


@pytest.mark.parametrize("optimizer", ["{name: sgd, lr: 0.1, momentum: 0.9}", "{name: adam, lr: 0.01}"])
def test_other_optimizers_match_too(ranks: RankPool, optimizer: str) -> None:
    choice = [f"training.optimizer={optimizer}"]
    one = ranks.run(1, work.train, CONFIG, ["training.strategy=single", "training.batch_size=12", *choice])[0]
    for strategy in ("ddp", "fsdp"):
        many = ranks.run(2, work.train, CONFIG, [*overrides_for(strategy, 2, 3), *choice])[0]
        assert_same_curve(many, one)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "bf16-true"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_other_precisions_learn_the_same_under_every_strategy(ranks: RankPool, strategy: str, precision: str) -> None:
    """Eight binary digits cannot agree to 1e-5; the curves must still be the same to the digits they have."""
    choice = [f"training.precision={precision}"]
    one = ranks.run(1, work.train, CONFIG, ["training.strategy=single", "training.batch_size=12", *choice])[0]
    many = ranks.run(2, work.train, CONFIG, [*overrides_for(strategy, 2, 2), *choice])[0]
    assert many["losses"][-1] < many["losses"][0]
    assert many["losses"] == pytest.approx(one["losses"], rel=2e-2)


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_an_overflow_in_fp16_skips_the_step_on_every_rank_and_is_recovered_from(ranks: RankPool, strategy: str) -> None:
    size = 1 if strategy == "single" else 2
    overrides = [f"training.strategy={strategy}", "training.precision=16-mixed", "training.batch_size=6"]
    results = ranks.run(size, work.with_session, CONFIG, overrides, _train_with_a_huge_scale)
    assert results[0]["skipped"][0], "a loss scale of 2^40 must overflow"
    assert not results[0]["skipped"][-1]
    assert all(result == results[0] for result in results), "all ranks skip the same steps"
    unchanged = results[0]["weight"][0] == results[0]["weight"][1]
    assert unchanged and results[0]["weight"][-1] != results[0]["weight"][0]


def _train_with_a_huge_scale(session: Any) -> dict[str, Any]:
    session.parts.scaler.load_state_dict({**session.parts.scaler.state_dict(), "scale": 2.0**40})
    record: dict[str, Any] = {"skipped": [], "weight": [float(work.full_weights(session)["norm.weight"].sum())]}
    for _ in range(6):  # 2^40 is halved at every step until the gradients fit
        session.state.cursor = type(session.cursor)(0, 0)
        session.state.step = 0
        for batch in session.batches():
            record["skipped"].append(session.step(batch).skipped)
            record["weight"].append(float(work.full_weights(session)["norm.weight"].sum()))
    return record


def test_dropout_differs_between_ranks_and_repeats_with_the_seed(ranks: RankPool) -> None:
    choice = ["model.dropout=0.5", "training.strategy=ddp", "training.batch_size=6"]
    first, again = (ranks.run(2, work.train, CONFIG, choice)[0] for _ in range(2))
    other = ranks.run(2, work.train, CONFIG, [*choice, "seed=1"])[0]
    assert first["losses"] == again["losses"]
    assert first["losses"] != other["losses"]
    assert len(set(ranks.run(2, _dropout_draw))) == 2


def _dropout_draw() -> float:
    """The first random number that this rank's model would draw in step 0."""
    return work.with_session(CONFIG, ["training.strategy=ddp"], _draw_in_step)


def _draw_in_step(session: Any) -> float:
    drawn: list[float] = []
    session.model.register_forward_pre_hook(lambda *_: drawn.append(float(torch.rand(()))))
    session.step(next(iter(session.batches())))
    return drawn[0]


def assert_same_curve(result: dict[str, Any], expected: dict[str, Any]) -> None:
    assert result["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert result["norms"] == pytest.approx(expected["norms"], rel=1e-5)
    assert result["lrs"] == expected["lrs"]
    assert result["weights"].keys() == expected["weights"].keys()
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(
            result["weights"][name], weight, rtol=1e-5, atol=1e-5, msg=functools.partial("{}: {}".format, name)
        )
