"""On a real GPU: every precision, ddp and fsdp with one rank over NCCL, the device path of the loader, resume."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import work
from tests.distributed.pool import RankPool
from tests.distributed.test_parity import CONFIG, assert_same_curve
from tests.tasks import config_of

pytestmark = pytest.mark.gpu

PRECISIONS = ["32-true", "bf16-mixed", "16-mixed", "bf16-true"]
STRATEGIES = ["single", "ddp", "fsdp"]
CHESS = """
task: chess
name: chess
data: {num_games: 200, max_plies: 20, num_workers: 2}
model: {hidden_dim: 64, num_layers: 2, num_heads: 4}
training: {batch_size: 16, max_epochs: 2, log_every_n_steps: 2, gradient_clip: 1.0}
"""


def options(strategy: str, precision: str = "32-true") -> list[str]:
    return [f"training.strategy={strategy}", f"training.precision={precision}", "training.device=cuda", "training.batch_size=4",
            "training.gradient_accumulation=3"]  # fmt: skip


@pytest.fixture(scope="module")
def on_cpu(_pool: RankPool) -> dict[str, Any]:
    overrides = ["training.strategy=single", "training.device=cpu", "training.batch_size=12"]
    return _pool.run(1, work.train, CONFIG, overrides)[0]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_in_fp32_a_gpu_computes_what_the_cpu_does(ranks: RankPool, on_cpu: dict[str, Any], strategy: str) -> None:
    result = ranks.run(1, work.train, CONFIG, options(strategy))[0]
    assert_same_curve(result, on_cpu)


@pytest.mark.parametrize("precision", PRECISIONS[1:])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_in_other_precisions_the_curve_is_the_same_to_the_digits_they_have(
    ranks: RankPool, on_cpu: dict[str, Any], strategy: str, precision: str
) -> None:
    result = ranks.run(1, work.train, CONFIG, options(strategy, precision))[0]
    assert result["losses"] == pytest.approx(on_cpu["losses"], rel=2e-2)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_resumed_on_a_gpu_it_is_bit_for_bit_the_uninterrupted_run(
    ranks: RankPool, tmp_path: Path, strategy: str, precision: str
) -> None:
    overrides = [*options(strategy, precision), "model.dropout=0.2", *work.folder_of(tmp_path)]
    work.resumed_bit_for_bit(ranks, 1, CONFIG, overrides, steps=4)


def test_a_checkpoint_of_the_gpu_goes_on_on_the_cpu(ranks: RankPool, tmp_path: Path, on_cpu: dict[str, Any]) -> None:
    folder = work.folder_of(tmp_path)
    head = ranks.run(1, functools.partial(work.train, steps=4, save=True), CONFIG, [*options("fsdp"), *folder])[0]
    cpu = ["training.strategy=ddp", "training.device=cpu", "training.batch_size=6", *folder]
    tail = ranks.run(2, functools.partial(work.train, resume="latest"), CONFIG, cpu)[0]
    joined = {key: head[key] + tail[key] for key in ("losses", "norms", "lrs")}
    assert_same_curve({**joined, "weights": tail["weights"]}, on_cpu)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_chess_trains_on_a_gpu_with_workers_pinned_memory_and_known_peak(
    ranks: RankPool, tmp_path: Path, strategy: str
) -> None:
    overrides = [f"training.strategy={strategy}", "training.precision=bf16-mixed"]
    outcome = ranks.run(1, work.run_fit, CHESS, overrides, str(tmp_path))[0]
    assert outcome["after"]["loss"] < outcome["before"]["loss"]
    facts = json.loads((tmp_path / "runs/chess/run.json").read_text())
    assert facts["device"] == torch.cuda.get_device_name()
    lines = [json.loads(line) for line in (tmp_path / "runs/chess/metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "eval" not in line]
    assert all(line["memory_kind"] == "allocated" for line in steps)
    if facts["mfu"]["peak_flops"]:
        assert all(0 < line["mfu"] < 1 for line in steps)


def test_batches_arrive_on_the_gpu_ahead_of_the_step(ranks: RankPool) -> None:
    devices = ranks.run(1, work.with_session, CHESS, ["training.device=cuda"], _devices)[0]
    assert devices == {"cuda:0"}


def _devices(session: Any) -> set[str]:
    return {str(micro.inputs["ids"].device) for batch in session.batches() for micro in batch.micro}


def test_a_gpu_that_is_not_there_is_answered(ranks: RankPool) -> None:
    with pytest.raises(AssertionError, match="has no GPU: this machine has"):
        ranks.run(1, _with_local_rank, 4096)


def _with_local_rank(local_rank: int) -> None:
    import os

    os.environ["LOCAL_RANK"] = str(local_rank)
    from shardwise.engine.session import Session

    Session(config_of(CHESS, ["training.device=cuda"]))
