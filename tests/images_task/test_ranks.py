"""Image models on several ranks: the numbers of one process, the memory order, and what batch norm does."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import work
from tests.distributed.pool import RankPool
from tests.distributed.test_parity import assert_same_curve
from tests.images_task.made import RESNET, VIT

# A bias of the keys changes nothing, since softmax is blind to it: its gradient is rounding, which AdamW would blow up.
EXACT = ["model.extra={qkv_bias: false}"]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_train_a_vit_as_one_does(ranks: RankPool, strategy: str) -> None:
    """59 images in batches of 12 leave a short one; crops and flips must not depend on who reads."""
    run = functools.partial(work.train, evaluate=True)
    one = ranks.run(1, run, VIT, ["training.strategy=single", *EXACT])[0]
    overrides = [f"training.strategy={strategy}", "training.batch_size=3", "training.gradient_accumulation=2", *EXACT]
    for result in ranks.run(2, run, VIT, overrides):
        assert_same_curve(result, one)
        assert result["metrics"] == pytest.approx(one["metrics"], rel=1e-5)


def test_loader_workers_do_not_change_the_numbers(ranks: RankPool) -> None:
    alone, with_workers = (ranks.run(1, work.train, VIT, [f"data.num_workers={n}"])[0] for n in (0, 2))
    assert alone["losses"] == with_workers["losses"]


# ---------------------------------------------------------------- batch norm


def test_with_batch_norm_two_ranks_give_other_numbers_than_one_and_learn_all_the_same(ranks: RankPool) -> None:
    run = functools.partial(work.train, evaluate=True)
    longer = ["training.max_epochs=12"]
    one = ranks.run(1, run, RESNET, ["training.strategy=single", "training.batch_size=16", *longer])[0]
    two = ranks.run(2, run, RESNET, ["training.strategy=ddp", "training.batch_size=8", *longer])
    assert two[0]["ids"][0] + two[1]["ids"][0] == one["ids"][0], "the same images make up the step"
    assert abs(two[0]["losses"][0] / one["losses"][0] - 1) > 1e-4
    assert two[0]["losses"] == two[1]["losses"] and two[0]["metrics"] == two[1]["metrics"]
    for result in (one, two[0]):
        assert sum(result["losses"][-3:]) < 0.8 * sum(result["losses"][:3])


def test_the_run_says_what_batch_norm_sees(ranks: RankPool, tmp_path: Path) -> None:
    output = ranks.run(2, work.run_fit, RESNET, ["training.max_steps=1"], str(tmp_path))[0]["output"]
    assert (
        "batch norm: each rank's statistics come from its own 8 samples, so the numbers depend on how many ranks there are; "
        "running statistics are rank 0's" in output
    )


def test_batch_norm_over_all_ranks_is_refused_on_cpus(ranks: RankPool) -> None:
    with pytest.raises(
        AssertionError, match=r"training.sync_batch_norm: true needs CUDA; on CPUs batch norm sees a rank's"
    ):
        ranks.run(2, work.train, RESNET, ["training.sync_batch_norm=true"])


# ---------------------------------------------------------------- channels last


@pytest.mark.parametrize(("strategy", "size"), [("single", 1), ("ddp", 2)])
@pytest.mark.parametrize("text", [RESNET, VIT])
def test_weights_and_batches_are_channels_last_on_every_rank(
    ranks: RankPool, text: str, strategy: str, size: int
) -> None:
    for weights, batch, after in ranks.run(size, work.with_session, text, [f"training.strategy={strategy}"], _orders):
        assert weights == {"channels_last"} and after == {"channels_last"}
        assert batch == "channels_last"


@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_without_channels_last_all_is_in_the_plain_order(ranks: RankPool, strategy: str) -> None:
    overrides = [f"training.strategy={strategy}", "model.channels_last=false"]
    assert ranks.run(1, work.with_session, RESNET, overrides, _orders)[0] == ({"plain"}, "plain", {"plain"})


def test_under_fsdp_only_batches_are_channels_last(ranks: RankPool) -> None:
    for weights, batch, _ in ranks.run(2, work.with_session, RESNET, ["training.strategy=fsdp"], _orders):
        assert weights == {"plain"} and batch == "channels_last"


def _orders(session: Any) -> tuple[set[str], str, set[str]]:
    """Of the convolutions' weights, of a batch, and of the weights after a step."""

    def weights() -> set[str]:
        # A 1 × 1 convolution is in both orders at once.
        found = [
            weight for weight in session.parts.strategy.module.parameters() if weight.dim() == 4 and weight.shape[3] > 1
        ]
        assert found
        return {_order(weight) for weight in found}

    before = weights()
    batch = next(iter(session.batches()))
    session.step(batch)
    return before, _order(batch.micro[0].inputs["pixels"]), weights()


def _order(tensor: torch.Tensor) -> str:
    plain, last = tensor.is_contiguous(), tensor.is_contiguous(memory_format=torch.channels_last)
    return {(True, False): "plain", (False, True): "channels_last"}.get((plain, last), "neither")


def test_the_curve_is_the_same_to_rounding_in_either_order(ranks: RankPool) -> None:
    last, plain = (
        ranks.run(2, work.train, VIT, [f"model.channels_last={choice}", *EXACT])[0] for choice in ("true", "false")
    )
    assert_same_curve(last, plain)


# ---------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_resumed_resnet_is_bit_for_bit_the_uninterrupted_run(ranks: RankPool, tmp_path: Path, strategy: str) -> None:
    overrides = [f"training.strategy={strategy}", "training.max_epochs=2", *work.folder_of(tmp_path)]
    work.resumed_bit_for_bit(ranks, 2, RESNET, overrides, steps=2)


@pytest.mark.parametrize(("text", "precision"), [(RESNET, "bf16-mixed"), (VIT, "bf16-mixed"), (VIT, "bf16-true")])
def test_narrow_arithmetic_learns_the_same(ranks: RankPool, text: str, precision: str) -> None:
    wide, narrow = (
        ranks.run(2, work.train, text, [f"training.precision={each}"])[0] for each in ("32-true", precision)
    )
    assert narrow["losses"] == pytest.approx(wide["losses"], rel=5e-2)


def test_narrow_weights_are_refused_where_there_is_batch_norm(ranks: RankPool) -> None:
    with pytest.raises(
        AssertionError, match=r"training.precision: bf16-true does not go with batch norm, .* use bf16-mixed"
    ):
        ranks.run(2, work.train, RESNET, ["training.precision=bf16-true"])


def test_a_last_batch_of_one_sample_is_said_at_the_start_and_explained_where_it_fails(
    ranks: RankPool, tmp_path: Path
) -> None:
    """Nine samples in batches of eight, down to a single value per channel."""
    one_left = ["data.num_images=12", "data.num_classes=3", "data.valid_fraction=0.25", "data.image_size=8"]
    one_left += ["model.depths=[1, 1, 1]", "model.widths=[16, 16, 16]", "training.strategy=single"]
    with pytest.raises(AssertionError, match="batch norm cannot take a micro-batch of one sample"):
        ranks.run(1, work.run_fit, RESNET, one_left, str(tmp_path))
    (tmp_path / "more").mkdir()
    output = ranks.run(1, work.run_fit, RESNET, [*one_left, "data.image_size=32"], str(tmp_path / "more"))[0]["output"]
    assert "warning: the last batch of an epoch has 1 sample(s) for 1 rank(s)" in output
