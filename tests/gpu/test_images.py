"""Image models on a real GPU: batch norm over all ranks, the memory order, the loader's path to the device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from tests.distributed import work
from tests.distributed.pool import RankPool
from tests.distributed.test_parity import assert_same_curve
from tests.images_task.made import RESNET, VIT
from tests.images_task.test_ranks import EXACT, _orders

pytestmark = pytest.mark.gpu

ON_GPU = ["training.device=cuda", "training.strategy=ddp"]


def test_batch_norm_over_all_ranks_trains_over_nccl(ranks: RankPool) -> None:
    overrides = [*ON_GPU, "training.sync_batch_norm=true", "training.max_epochs=12"]
    kinds, losses = ranks.run(1, work.with_session, RESNET, overrides, _norms_and_losses)[0]
    assert kinds == {nn.SyncBatchNorm}
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])


def test_on_one_rank_batch_norm_stays_as_it_is_unless_asked(ranks: RankPool) -> None:
    kinds, losses = ranks.run(1, work.with_session, RESNET, ON_GPU, _norms_and_losses)[0]
    _, synced = ranks.run(1, work.with_session, RESNET, [*ON_GPU, "training.sync_batch_norm=true"], _norms_and_losses)[
        0
    ]
    assert kinds == {nn.BatchNorm2d}
    assert synced == pytest.approx(losses, rel=1e-3), "over one rank, all ranks' statistics are its own"


def _norms_and_losses(session: Any) -> tuple[set[type], list[float]]:
    norms = {type(module) for module in session.parts.strategy.module.modules() if isinstance(module, _BatchNorm)}
    return norms, [session.loss(session.step(batch)) for batch in session.batches()]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_weights_and_batches_are_channels_last_on_the_gpu(ranks: RankPool, strategy: str, workers: int) -> None:
    """Through the workers' pipe, pinned memory and the copy to the device."""
    overrides = ["training.device=cuda", f"training.strategy={strategy}", f"data.num_workers={workers}"]
    assert ranks.run(1, work.with_session, RESNET, overrides, _orders)[0] == (
        {"channels_last"},
        "channels_last",
        {"channels_last"},
    )


def test_in_fp32_a_gpu_trains_a_vit_as_the_cpu_does(ranks: RankPool) -> None:
    on_cpu = ranks.run(1, work.train, VIT, ["training.device=cpu", "training.strategy=single", *EXACT])[0]
    assert_same_curve(ranks.run(1, work.train, VIT, [*ON_GPU, *EXACT])[0], on_cpu)


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_a_resnet_learns_in_bf16_with_a_known_share_of_the_peak(ranks: RankPool, tmp_path: Path, strategy: str) -> None:
    overrides = ["training.device=cuda", f"training.strategy={strategy}", "training.precision=bf16-mixed",
                 "training.max_epochs=20", "data.num_workers=2"]  # fmt: skip
    outcome = ranks.run(1, work.run_fit, RESNET, overrides, str(tmp_path))[0]
    assert outcome["after"]["loss"] < outcome["before"]["loss"]
    facts = json.loads((tmp_path / "runs/images/run.json").read_text())
    lines = [json.loads(line) for line in (tmp_path / "runs/images/metrics.jsonl").read_text().splitlines()]
    if facts["mfu"]["peak_flops"]:
        assert all(0 < line["mfu"] < 1 for line in lines if "eval" not in line)
