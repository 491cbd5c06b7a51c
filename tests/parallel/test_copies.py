"""How many copies of a model so many ranks hold."""

from __future__ import annotations

import pytest

from shardwise.config import parse_config
from shardwise.errors import ConfigError
from shardwise.parallel import strategy_for


@pytest.mark.parametrize(
    ("training", "ranks", "copies"),
    [
        ("", 1, 1),
        ("", 4, 4),
        ("fsdp: {sharding_strategy: HYBRID_SHARD, shard_size: 2}", 4, 4),  # sharded, and yet each has its own samples
        ("pipeline: {stages: 2}", 8, 4),
        ("strategy: pipeline", 4, 1),
        ("pipeline: {stages: 2}, fsdp: {}", 4, 2),
        ("tensor: {size: 2}", 8, 4),
        ("strategy: tensor, num_nodes: 2", 8, 2),  # by default a machine shares every matrix
    ],
)
def test_ranks_that_share_a_model_share_its_samples(training: str, ranks: int, copies: int) -> None:
    assert strategy_for(parse_config(f"task: chess\ntraining: {{{training}}}"), ranks).copies(ranks) == copies


def test_a_number_of_ranks_that_does_not_divide_is_refused_with_those_that_do() -> None:
    with pytest.raises(
        ConfigError, match=r"tensor.size: 4 does not go with 6 rank\(s\): 6 ranks can be divided by 2, 3, 6"
    ):
        strategy_for(parse_config("task: chess\ntraining: {tensor: {size: 4}}"), 6).copies(6)
