"""The host that runs a step ahead of the device. On the CPU nothing is gained by it, but the arithmetic can be tried."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.engine import optimizer as optimizer_module
from shardwise.engine.parts import Parts
from shardwise.engine.session import Session
from shardwise.errors import NonFiniteError
from shardwise.tasks import Loss
from tests.distributed import work
from tests.distributed.pool import RankPool
from tests.tasks import Ragged, config_of

TEXT = "task: tests.tasks:Ragged\ntraining: {batch_size: 4, gradient_clip: 0.5, max_epochs: 2}\n"


class PoisonedAtThree(Ragged):
    """The third step's loss is not finite."""

    calls = 0
    loss_is_a_sum = False  # it counts its calls: the first step asks nothing more of it

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        PoisonedAtThree.calls += 1
        loss = super().loss(model, batch)
        return Loss(loss.sum * (math.nan if PoisonedAtThree.calls == 3 else 1.0), loss.count)


def fused(groups: Any, options: Any) -> Any:
    kind, settings = KIND_OF(groups, options)
    return kind, {**settings, "fused": True}


KIND_OF = optimizer_module._kind_of


def run_ahead(patch: pytest.MonkeyPatch) -> None:
    """As on a GPU: PyTorch's fused optimizer, which clips and looks for what is not finite by itself."""
    patch.setattr(Parts, "runs_ahead", property(lambda self: True))
    patch.setattr(optimizer_module, "_kind_of", fused)


def train_ahead(*args: Any, **options: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        run_ahead(patch)
        return work.train(*args, **options)


@pytest.mark.parametrize(
    ("optimizer", "strategy"),
    [("adamw", "single"), ("adamw", "ddp"), ("adamw", "fsdp"), ("adamw", "zero1"), ("sgd", "single"), ("sgd", "ddp")],
)
def test_the_curve_is_that_of_a_host_that_waits(ranks: RankPool, strategy: str, optimizer: str) -> None:
    size = 1 if strategy == "single" else 2
    overrides = [f"training.strategy={strategy}", f"training.optimizer.name={optimizer}"]
    waits = ranks.run(size, work.train, TEXT, overrides)[0]
    ahead = ranks.run(size, train_ahead, TEXT, overrides)[0]
    assert ahead["losses"] == pytest.approx(waits["losses"], rel=1e-4)
    assert ahead["norms"] == pytest.approx(waits["norms"], rel=1e-3)
    for name, weight in waits["weights"].items():
        torch.testing.assert_close(ahead["weights"][name], weight, rtol=1e-3, atol=1e-4)


def test_a_step_that_is_not_finite_changes_nothing_and_is_told_one_step_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_ahead(monkeypatch)
    monkeypatch.setattr(PoisonedAtThree, "calls", 0)
    config = config_of(TEXT.replace("tests.tasks:Ragged", f"{__name__}:PoisonedAtThree"), [f"run_dir={tmp_path}"])
    with Session(config) as session:
        session.prepare()
        steps = session.batches()
        session.step(next(steps))
        session.step(next(steps))
        before = {name: weight.clone() for name, weight in session.model.state_dict().items()}
        session.step(next(steps))
        assert all(torch.equal(weight, before[name]) for name, weight in session.model.state_dict().items())
        with pytest.raises(NonFiniteError, match="step 3: the loss is not finite on rank 0, samples"):
            session.step(next(steps))


def test_no_checkpoint_is_made_of_a_step_that_is_not_finite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_ahead(monkeypatch)
    monkeypatch.setattr(PoisonedAtThree, "calls", 2)
    config = config_of(TEXT.replace("tests.tasks:Ragged", f"{__name__}:PoisonedAtThree"), [f"run_dir={tmp_path}"])
    with Session(config) as session:
        session.prepare()
        session.step(next(session.batches()))
        with pytest.raises(NonFiniteError, match="step 1: the loss is not finite"):
            session.save()
    assert not list(tmp_path.glob("checkpoints/step-*"))
