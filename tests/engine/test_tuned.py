"""Compiled blocks and updates in one pass, wired through a whole run. With PyTorch's `eager` backend, which compiles nothing."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.engine import build as build_module
from shardwise.engine import optimizer as optimizer_module
from shardwise.kernels import low_precision_adamw
from shardwise.kernels.low_precision_adamw import LowPrecisionAdamW
from shardwise.kernels.regions import compile_regions
from shardwise.parallel import recipe
from tests.distributed import work
from tests.distributed.pool import RankPool

TEXT = """
task: tests.tasks:Ragged
training: {batch_size: 4, precision: bf16-mixed, narrow_weights: true, gradient_clip: 0.5, max_epochs: 2, optimizer: {lr: 0.01}}
"""


def train_tuned(*args: Any, **options: Any) -> Any:
    """As on a GPU."""
    kind_of = optimizer_module._kind_of
    used: list[str] = []

    def fused(groups: Any, given: Any) -> Any:
        kind, settings = kind_of(groups, given)
        return kind, {**settings, "fused": True}

    def updated(*given: Any) -> None:
        used.append(str(given[1].dtype))
        low_precision_adamw.update(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer_module, "_kind_of", fused)
        patch.setattr(
            recipe,
            "compile_regions",
            functools.partial(compile_regions, backend="eager"),
        )
        patch.setattr(low_precision_adamw, "LARGE", 64)
        patch.setattr(LowPrecisionAdamW, "_run", lambda self, *given: updated(*given))
        return {**work.train(*args, **options), "updated_from": sorted(set(used))}


@pytest.mark.parametrize(
    ("strategy", "accumulation", "updated_from"),
    [
        ("single", 1, ["torch.bfloat16"]),
        ("single", 3, ["torch.float32"]),
        ("ddp", 1, ["torch.float32"]),
        ("ddp", 2, ["torch.float32"]),
        ("fsdp", 1, []),
    ],
)
def test_the_curve_is_that_of_plain_blocks_and_updates(
    ranks: RankPool, strategy: str, accumulation: int, updated_from: list[str]
) -> None:
    size = 1 if strategy == "single" else 2
    options = [f"training.strategy={strategy}", f"training.gradient_accumulation={accumulation}"]
    plain = ranks.run(size, work.train, TEXT, options)[0]
    tuned = ranks.run(size, train_tuned, TEXT, [*options, "training.compile=true"])[0]
    assert tuned["updated_from"] == updated_from
    assert tuned["losses"] == pytest.approx(plain["losses"], rel=0.01)
    assert tuned["norms"] == pytest.approx(plain["norms"], rel=0.05)


def test_resumed_it_goes_on_with_the_weights_of_the_checkpoint(ranks: RankPool, tmp_path: Path) -> None:
    """Copies that were made with the last update must not outlive the weights that they were made of."""
    options = ["training.strategy=single", "training.compile=true", *work.folder_of(tmp_path)]
    work.resumed_bit_for_bit(ranks, 1, TEXT, options, steps=4, job=train_tuned)


@pytest.mark.parametrize(("steps", "compiles"), [(199, False), (200, True)])
def test_long_runs_on_a_gpu_are_compiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, steps: int, compiles: bool
) -> None:
    from shardwise.engine.session import Session
    from tests.tasks import config_of

    config = config_of(TEXT, [f"training.max_steps={steps}", "training.max_epochs=99", *work.folder_of(tmp_path)])
    with Session(config) as session:
        session.prepare()
        assert session.parts.strategy.regions is None, "not on a CPU"
        monkeypatch.setattr(session.world, "device", torch.device("cuda"))
        assert build_module._compiles(session.config, session.plan, session.total_steps) is compiles
        monkeypatch.setattr(session.world, "device", torch.device("cpu"))
    assert build_module.COMPILING_PAYS_AFTER == 200
