"""On a real GPU, one rank over NCCL: the ways to spread a model that one rank can take. Pipelines and tensor groups need two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed import work
from tests.distributed.pool import FreshRanks
from tests.distributed.test_parity import CONFIG, assert_same_curve

pytestmark = pytest.mark.gpu

WAYS = {
    "dp": ["strategy=dp"],
    "zero1": ["strategy=zero1"],
    "ddp, no views": ["strategy=ddp", "ddp.gradient_as_bucket_view=false"],
    "SHARD_GRAD_OP": ["fsdp.sharding_strategy=SHARD_GRAD_OP"],
    "NO_SHARD": ["fsdp.sharding_strategy=NO_SHARD"],
    "cpu_offload": ["fsdp.cpu_offload=true"],
    "recompute": ["fsdp.activation_checkpointing=true"],
    "recompute every 2nd": ["fsdp.activation_checkpointing=selective"],
    "recompute operations": ["fsdp={activation_checkpointing: selective, selective: operations}"],
    "prefetch": ["fsdp.prefetch=2"],
    "reduce every micro-batch": ["fsdp.reduce_every_micro_batch=true"],
}
HOOKS = {
    name: ["strategy=ddp", f"ddp.comm_hook={name}", "ddp.powersgd_warmup_steps=2"]
    for name in ("fp16", "bf16", "powersgd")
}
ON_GPU = ["training.device=cuda", "training.batch_size=4", "training.gradient_accumulation=3"]


def overrides_of(way: str) -> list[str]:
    return [*ON_GPU, *(f"training.{each}" for each in (WAYS | HOOKS)[way])]


@pytest.fixture(scope="module")
def on_cpu(fresh_ranks: FreshRanks) -> dict[str, Any]:
    return fresh_ranks.run(1, work.train, CONFIG, ["training.device=cpu", "training.batch_size=12"])[0]


@pytest.mark.parametrize("way", WAYS)
def test_in_fp32_a_gpu_computes_what_the_cpu_does(fresh_ranks: FreshRanks, on_cpu: dict[str, Any], way: str) -> None:
    assert_same_curve(fresh_ranks.run(1, work.train, CONFIG, overrides_of(way))[0], on_cpu)


@pytest.mark.parametrize("way", WAYS)
def test_in_bf16_the_curve_is_nearly_the_same(fresh_ranks: FreshRanks, on_cpu: dict[str, Any], way: str) -> None:
    narrow = [*overrides_of(way), "training.precision=bf16-mixed"]
    assert fresh_ranks.run(1, work.train, CONFIG, narrow)[0]["losses"] == pytest.approx(on_cpu["losses"], rel=2e-2)


def test_offloaded_parameters_are_trained_in_fp16_too(fresh_ranks: FreshRanks, on_cpu: dict[str, Any]) -> None:
    narrow = [*overrides_of("cpu_offload"), "training.precision=16-mixed"]
    assert fresh_ranks.run(1, work.train, CONFIG, narrow)[0]["losses"] == pytest.approx(on_cpu["losses"], rel=2e-2)


@pytest.mark.parametrize("way", HOOKS)
def test_compressed_gradients_learn_nearly_the_same(fresh_ranks: FreshRanks, on_cpu: dict[str, Any], way: str) -> None:
    result = fresh_ranks.run(1, work.train, CONFIG, overrides_of(way))[0]
    assert result["losses"] == pytest.approx(on_cpu["losses"], rel=2e-2)


@pytest.mark.parametrize("way", ["cpu_offload", "powersgd", "recompute operations"])
def test_resumed_on_a_gpu_it_is_bit_for_bit_the_uninterrupted_run(
    fresh_ranks: FreshRanks, tmp_path: Path, way: str
) -> None:
    overrides = [*overrides_of(way), "model.dropout=0.2", *work.folder_of(tmp_path)]
    work.resumed_bit_for_bit(fresh_ranks, 1, CONFIG, overrides, steps=4)
