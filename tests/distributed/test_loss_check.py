"""The check of the loss on several ranks: it changes no bit of a run, all ranks come to one finding, and none is left waiting."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.engine.loss_check import examine_loss
from shardwise.engine.session import Session
from shardwise.tasks import Loss
from tests.distributed import work
from tests.distributed.pool import RankPool
from tests.tasks import Ragged

CONFIG = """
task: tests.distributed.test_loss_check:{task}
model: {{layers: 4, dropout: 0.2}}
training: {{total_batch_size: 12, batch_size: 3, gradient_clip: 0.5, max_epochs: 1, optimizer: {{name: adamw, lr: 0.01}}}}
"""


class Asked(Ragged):
    """With running statistics, which a forward pass changes."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.norm = _Normed(self.config.model.width)
        return model


class _Normed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden.flatten(0, 1)).view(hidden.shape)


class NotAsked(Asked):
    loss_is_a_sum = False


class PlainAsked(Ragged):
    pass


class PlainNotAsked(Ragged):
    loss_is_a_sum = False


class LooksAsked(Ragged):
    """The loss looks at more of the model than what calling it gives."""

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        assert isinstance(model.head, nn.Linear)
        return super().loss(model, batch)


class LooksNotAsked(LooksAsked):
    loss_is_a_sum = False


class Mean(Ragged):
    """A mean that counts as all tokens."""

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        loss = super().loss(model, batch)
        return Loss(loss.sum / loss.count, loss.count)


WAYS = {
    "single": (1, ["strategy=single"], "Asked"),
    "ddp": (2, ["strategy=ddp"], "Asked"),
    "ddp in bf16": (2, ["strategy=ddp", "precision=bf16-mixed", "narrow_weights=true"], "PlainAsked"),
    "zero1": (2, ["strategy=zero1"], "Asked"),
    "local_sgd": (2, ["strategy=local_sgd"], "Asked"),
    "fsdp": (2, ["strategy=fsdp"], "Asked"),
    "offload": (2, ["fsdp.cpu_offload=true"], "PlainAsked"),
    "recompute": (2, ["fsdp.activation_checkpointing=true"], "PlainAsked"),
    "tensor": (2, ["tensor.size=2"], "PlainAsked"),
    "pipeline": (2, ["pipeline.schedule=1f1b"], "PlainAsked"),
    "interleaved": (2, ["pipeline.schedule=interleaved"], "LooksAsked"),
    "pipeline, sharded": (
        4,
        ["pipeline.stages=2", "pipeline.schedule=gpipe", "fsdp.sharding_strategy=FULL_SHARD"],
        "PlainAsked",
    ),
}


def overridden(way: str, folder: Path) -> list[str]:
    return [*(f"training.{each}" for each in WAYS[way][1]), f"run_dir={folder}"]


def found(session: Session) -> tuple[str, str]:
    finding = examine_loss(session.parts, session.train_data, next(session.batches()), 1)
    return finding.kind, finding.said


@pytest.mark.parametrize("way", WAYS)
def test_a_run_is_bit_for_bit_what_it_is_without_the_check(ranks: RankPool, tmp_path: Path, way: str) -> None:
    size, _, task = WAYS[way]
    overrides = overridden(way, tmp_path)
    without = task.replace("Asked", "NotAsked")
    assert ranks.run(size, work.with_session, CONFIG.format(task=task), overrides, found) == [("sum", "")] * size
    checked = ranks.run(size, work.train, CONFIG.format(task=task), overrides)
    plain = ranks.run(size, work.train, CONFIG.format(task=without), overrides)
    for one, other in zip(checked, plain, strict=True):
        assert one["losses"] == other["losses"] and one["norms"] == other["norms"]
        assert one["weights"].keys() == other["weights"].keys()
        assert all(torch.equal(weight, other["weights"][name]) for name, weight in one["weights"].items())


@pytest.mark.parametrize("way", WAYS)
def test_a_mean_ends_every_rank_before_its_first_step(ranks: RankPool, tmp_path: Path, way: str) -> None:
    size = WAYS[way][0]
    with pytest.raises(AssertionError) as failure:
        ranks.run(size, work.train, CONFIG.format(task="Mean"), overridden(way, tmp_path))
    said = str(failure.value)
    assert said.count("NoSum: step 1: the loss (Mean.loss, test_loss_check.py:") == size
    assert "return Loss(sum=loss * count, count=count)" in said


def test_a_resumed_run_is_checked_and_goes_on_bit_for_bit(ranks: RankPool, tmp_path: Path) -> None:
    for strategy in ("ddp", "fsdp"):
        folder = tmp_path / strategy
        text, overrides = CONFIG.format(task="Asked"), [f"training.strategy={strategy}", f"run_dir={folder}"]
        work.resumed_bit_for_bit(ranks, 2, text, overrides, steps=2)
        with pytest.raises(AssertionError, match=r"step 3: the loss \(MeanNow.loss, .* is a mean, not a sum"):
            ranks.run(2, partial(work.train, resume="latest"), CONFIG.format(task="MeanNow"), overrides)


class MeanNow(Asked):
    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        loss = super().loss(model, batch)
        return Loss(loss.sum / loss.count, loss.count)


# ---------------------------------------------------------------- ranks that see different things


class OneRankFails(Ragged):
    """On rank 1 the loss of these samples cannot be computed in evaluation mode."""

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        loss = super().loss(model, batch)
        if os.environ["RANK"] == "1" and not model.training:
            raise TypeError("only on rank 1")
        return loss


class OneRankCannotRead(Ragged):
    def collate(self, samples: list[Tensor]) -> dict[str, Tensor]:
        if os.environ["RANK"] == "1" and len({id(each) for each in samples}) < len(samples):
            raise KeyError("the same sample twice")
        return super().collate(samples)


class OneRankHasNothing(Mean):
    """On rank 1 all losses are zero."""

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        loss = super().loss(model, batch)
        return Loss(loss.sum * (os.environ["RANK"] == "0"), loss.count)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_that_cannot_tell_leave_it_to_the_others(ranks: RankPool, tmp_path: Path, strategy: str) -> None:
    overrides = [f"training.strategy={strategy}", f"run_dir={tmp_path}"]

    def findings(task: str) -> list[Any]:
        return ranks.run(2, work.with_session, CONFIG.format(task=task), overrides, found)

    assert [kind for kind, _ in findings("OneRankFails")] == ["sum"] * 2
    assert [kind for kind, _ in findings("OneRankCannotRead")] == ["unknown"] * 2
    assert [kind for kind, _ in findings("OneRankHasNothing")] == ["mean"] * 2
    ranks.run(2, work.train, CONFIG.format(task="OneRankFails"), overrides)
    ranks.run(2, work.train, CONFIG.format(task="OneRankCannotRead"), overrides)


def test_more_ranks_than_samples(ranks: RankPool, tmp_path: Path) -> None:
    """The ranks without a sample of their own ask with one of another."""
    overrides = ["training.strategy=fsdp", "data.samples=2", f"run_dir={tmp_path}"]
    few = CONFIG.replace("total_batch_size: 12, batch_size: 3", "total_batch_size: 4, batch_size: 1")
    plain, mean = few.format(task="PlainAsked"), few.format(task="Mean")
    assert ranks.run(4, work.with_session, plain, overrides, found) == [("sum", "")] * 4
    assert {kind for kind, _ in ranks.run(4, work.with_session, mean, overrides, found)} == {"mean"}
