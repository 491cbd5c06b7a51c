"""The decision matrix: the plainest strategy that fits."""

from __future__ import annotations

import pytest

from shardwise.config import parse_config
from shardwise.parallel import strategy_class
from shardwise.plan import Machines, ModelSizes, advise

GIB = 2**30
LLAMA_7B = ModelSizes(parameters=6_738_415_616, trained=6_738_415_616, largest_block=262_410_240)
SMALL = ModelSizes(parameters=100_000_000, trained=100_000_000, largest_block=7_000_000)


def training(text: str = "") -> object:
    return parse_config(f"task: chess\ntraining: {{precision: bf16-mixed{text}}}").training


@pytest.mark.parametrize(
    ("sizes", "machines", "strategy", "because"),
    [
        (SMALL, Machines(1, 1, 80 * GIB), "single", "a whole copy fits"),
        (SMALL, Machines(8, 1, 80 * GIB), "ddp", "ddp is then fastest"),
        (LLAMA_7B, Machines(8, 1, 141 * GIB), "zero1", "shards that alone"),
        (LLAMA_7B, Machines(8, 1, 80 * GIB), "SHARD_GRAD_OP", "over 8 devices"),
        (LLAMA_7B, Machines(8, 1, 26 * GIB), "FULL_SHARD", "over 8 devices"),
        (LLAMA_7B, Machines(16, 2, 40 * GIB, slow_network=True), "HYBRID_SHARD", "only gradients cross"),
        (LLAMA_7B, Machines(1, 1, 80 * GIB), "cpu_offload", "such devices"),
        (ModelSizes(10**11, 10**11, 10**10), Machines(64, 8, 40 * GIB), "tensor", "must be split itself"),
    ],
)
def test_the_plainest_strategy_that_fits_is_advised(
    sizes: ModelSizes, machines: Machines, strategy: str, because: str
) -> None:
    found = advise(sizes, training(), machines)  # type: ignore[arg-type]
    assert found.strategy == strategy
    assert because in " ".join(found.reasons)
    parse_config("task: chess\ntraining:\n" + "\n".join(f"  {line}" for line in found.lines))


def test_the_arithmetic_of_a_7b_model_is_that_of_the_field() -> None:
    """4 + 4 + 8 bytes per parameter under Adam with fp32 weights: 107.8 GB, sharded over 8 an eighth of it."""
    whole = strategy_class("ddp")(training()).held_bytes(LLAMA_7B, 8)  # type: ignore[arg-type]
    assert whole.total == 16 * LLAMA_7B.parameters
    sharded = strategy_class("fsdp")(training()).held_bytes(LLAMA_7B, 8)  # type: ignore[arg-type]
    assert sharded.total - sharded.gathered == whole.total / 8
    sgd = strategy_class("ddp")(training(", optimizer: {name: sgd}")).held_bytes(LLAMA_7B, 8)  # type: ignore[arg-type]
    assert sgd.optimizer == 0
