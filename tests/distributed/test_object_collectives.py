"""What ranks tell each other is plain data, and arrives as it was sent."""

from __future__ import annotations

import errno
import math
import re
from collections import OrderedDict
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.utils._pytree import register_pytree_node

from shardwise.errors import ConfigError, DataError, ShardwiseError
from shardwise.parallel import World
from shardwise.parallel.object_collectives import broadcast_tree, error_heard, error_told
from tests.distributed.pool import RankPool


def test_values_of_any_size_reach_every_rank(ranks: RankPool) -> None:
    for everyone in ranks.run(3, _gathered):
        assert everyone[0] == {"rank": 0, "text": "", "limit": math.inf, "pair": [1, None]}
        assert everyone[2] == {"rank": 2, "text": "ü" * 20_000, "limit": math.inf, "pair": [1, None]}


def _gathered() -> list[Any]:
    world = World.join("cpu")
    try:
        return world.gather(
            {"rank": world.rank, "text": "ü" * 10_000 * world.rank, "limit": math.inf, "pair": (1, None)}
        )
    finally:
        world.leave()


def test_tensors_of_any_size_reach_every_rank(ranks: RankPool) -> None:
    for everyone in ranks.run(2, _gathered_tensors):
        assert [sorted(each) for each in everyone] == [[], ["a", "b"]]
        assert everyone[1]["a"].tolist() == [[0, 2], [1, 3]] and everyone[1]["b"].dtype == torch.bfloat16


def _gathered_tensors() -> list[dict[str, torch.Tensor]]:
    world = World.join("cpu")
    own = {"a": torch.arange(4).view(2, 2).T, "b": torch.zeros(0, 3, dtype=torch.bfloat16)}
    try:
        return world.gather_tensors(own if world.rank else {})
    finally:
        world.leave()


def test_an_error_of_the_first_rank_is_of_the_same_kind_on_every_rank(ranks: RankPool) -> None:
    for kind, number, name, said in ranks.run(2, _fails_on_first):
        assert (kind, number, name) == ("PermissionError", errno.EACCES, "/there")
        assert said == "[Errno 13] Permission denied: '/there'"


def _fails_on_first() -> tuple[str, int | None, str, str]:
    world = World.join("cpu")

    def fails() -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/there")

    with pytest.raises(OSError) as caught:
        world.on_first(fails)
    world.leave()
    error = caught.value
    return type(error).__name__, error.errno, error.filename, str(error)


def test_what_a_model_returns_reaches_every_rank(ranks: RankPool) -> None:
    for kind, logits, hidden, more in ranks.run(2, _tree):
        assert (kind, logits, hidden, more) == ("CausalLMOutput", [[1.5, 2.5]], [[0], [1]], None)


def _tree() -> tuple[str, Any, Any, Any]:
    from transformers.modeling_outputs import CausalLMOutput

    world = World.join("cpu")
    tree = CausalLMOutput(logits=torch.tensor([[1.5, 2.5]]), hidden_states=(torch.tensor([0]), torch.tensor([1])))
    got = broadcast_tree(tree if world.rank == 1 else None, 1, None, world.device)
    world.leave()
    return type(got).__name__, got.logits.tolist(), [each.tolist() for each in got.hidden_states], got.loss


def test_what_cannot_be_plain_data_is_refused_and_not_pickled() -> None:
    with pytest.raises(ShardwiseError, match=r"is plain data.*object is not JSON serializable"):
        World.alone().gather(OrderedDict(a=object()))


@pytest.mark.parametrize(
    "way", ["on_first", "from_first", "gather", "gather_tensors", "broadcast_tree", "nameless class"]
)
def test_what_one_rank_cannot_send_is_the_same_error_on_every_rank(way: str, ranks: RankPool) -> None:
    problem = {
        "gather_tensors": "rank 0: tensors that cannot be sent to the other ranks: .*torch.complex128",
        "broadcast_tree": "rank 0: the model returned object, which cannot be handed to the other ranks",
        "nameless class": "rank 0: what the model returned cannot be handed to the other ranks: .*Nameless",
    }
    said, heard = ranks.run(2, _unfit, way, timeout=60)
    assert said == heard, "the sentence is one"
    assert re.match(problem.get(way, "rank 0: what ranks tell each other is plain data .*Tensor is not JSON"), said)


class Nameless:
    """What a model may return: registered with PyTorch, but with no name that other processes know it by."""

    def __init__(self, value: Any) -> None:
        self.value = value


register_pytree_node(Nameless, lambda each: ([each.value], None), lambda values, _: Nameless(*values))


def _unfit(way: str) -> str:
    """Rank 0 has what cannot be sent; afterwards the ranks still understand each other."""
    world = World.join("cpu", timeout=timedelta(seconds=30))
    first = world.is_first
    value: Any = torch.zeros(2) if first else 1
    ways: dict[str, Callable[[], Any]] = {
        "on_first": lambda: world.on_first(lambda: value),
        "from_first": lambda: world.from_first(value),
        "gather": lambda: world.gather({"a": value}),
        "gather_tensors": lambda: world.gather_tensors({"a": torch.zeros(2, dtype=torch.complex128)} if first else {}),
        "broadcast_tree": lambda: broadcast_tree({"a": object()}, 0, None, world.device),
        "nameless class": lambda: broadcast_tree(Nameless(value), 0, None, world.device),
    }
    with pytest.raises(ShardwiseError) as caught:
        ways[way]()
    assert world.gather(world.rank) == [0, 1]
    world.leave()
    return str(caught.value)


class Mine(DataError):
    """A task's own kind of error."""


def test_errors_are_told_by_the_nearest_kind_that_everybody_knows() -> None:
    for error, kind in ((ConfigError("a"), ConfigError), (Mine("b"), DataError), (OSError("c"), OSError)):
        heard = error_heard(error_told(error) or {})
        assert type(heard) is kind and str(heard) == str(error)
    assert isinstance(error_heard({"kind": "annotations", "message": "made up"}), OSError)
    assert isinstance(error_heard({"kind": "ShardwiseError", "message": "x"}), ShardwiseError)
