"""The arithmetic of batch sizes: what is asked for is what is used, or the error says what could be."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from shardwise.config import Batching, Training, resolve_batching, resolve_learning_rate
from shardwise.config.batching import keep_global_batch
from shardwise.config.schema import Optimizer
from shardwise.errors import ConfigError

small = st.integers(1, 40)


@pytest.mark.parametrize(
    ("options", "world", "accumulation", "global_batch"),
    [
        ({"batch_size": 4}, 1, 1, 4),
        ({"batch_size": 4}, 8, 1, 32),
        ({"batch_size": 4, "gradient_accumulation": 3}, 2, 3, 24),
        ({"batch_size": 4, "total_batch_size": 24}, 2, 3, 24),
        ({"batch_size": 4, "total_batch_size": 24}, 6, 1, 24),
        ({"batch_size": 1, "total_batch_size": 7}, 1, 7, 7),
    ],
)
def test_the_effective_batch_is_batch_size_times_accumulation_times_devices(
    options: dict[str, Any], world: int, accumulation: int, global_batch: int
) -> None:
    batching = resolve_batching(Training(**options), world)
    assert batching == Batching(world, options["batch_size"], accumulation)
    assert batching.global_batch == global_batch


@given(batch_size=small, world=small, total=st.integers(1, 2000))
def test_a_total_batch_size_is_met_exactly_or_refused(batch_size: int, world: int, total: int) -> None:
    training = Training(batch_size=batch_size, total_batch_size=total)
    if total % (batch_size * world) == 0:
        assert resolve_batching(training, world).global_batch == total
    else:
        with pytest.raises(ConfigError):
            resolve_batching(training, world)


@pytest.mark.parametrize(
    ("batch_size", "world", "total", "remedies"),
    [
        (4, 2, 12, "training.total_batch_size: 8 or 16; or training.batch_size: 6 or 3 or 2 or 1"),
        (4, 2, 6, "training.total_batch_size: 8; or training.batch_size: 3 or 1"),
        (2, 4, 6, "training.total_batch_size: 8; or training.num_gpus: 3 or 1"),
        (2, 4, 7, "training.total_batch_size: 8"),
    ],
)
def test_a_total_that_does_not_divide_is_answered_with_what_would_fit(
    batch_size: int, world: int, total: int, remedies: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_batching(Training(batch_size=batch_size, total_batch_size=total), world)
    assert str(caught.value) == (
        f"training.total_batch_size: {total} is not a multiple of batch_size × devices = {batch_size} × {world} = "
        f"{batch_size * world}.\n  what would fit: {remedies}"
    )


@given(batch_size=small, per_node=st.integers(1, 6), nodes=st.integers(1, 4), total=st.integers(1, 500))
@example(batch_size=2, per_node=2, nodes=2, total=6)  # 3 devices would divide, but not over 2 machines
def test_each_remedy_that_the_error_names_fits(batch_size: int, per_node: int, nodes: int, total: int) -> None:
    world = per_node * nodes
    assume(total % (batch_size * world))
    asked: dict[str, Any] = {"batch_size": batch_size, "num_gpus": world, "num_nodes": nodes, "total_batch_size": total}
    with pytest.raises(ConfigError) as caught:
        resolve_batching(Training(**asked), world)
    offered = remedies_in(str(caught.value))
    assert offered
    for key, value in offered:
        changed = {**asked, key: value}
        batching = resolve_batching(Training(**changed), changed["num_gpus"])
        assert batching.global_batch == changed["total_batch_size"]


def remedies_in(message: str) -> list[tuple[str, int]]:
    _, _, offer = message.partition("what would fit: ")
    found: list[tuple[str, int]] = []
    for remedy in offer.split("; or "):
        match = re.fullmatch(r"training\.(\w+): (\d+(?: or \d+)*)", remedy)
        assert match, remedy
        found += [(match.group(1), int(value)) for value in match.group(2).split(" or ")]
    return found


@given(samples=st.integers(0, 500), batch_size=small, accumulation=st.integers(1, 4), world=st.integers(1, 8))
def test_the_last_short_batch_is_a_step_too(samples: int, batch_size: int, accumulation: int, world: int) -> None:
    batching = Batching(world, batch_size, accumulation)
    assert batching.steps_per_epoch(samples) == len(range(0, samples, batching.global_batch))


@pytest.mark.parametrize(
    ("options", "global_batch", "rate"),
    [
        ({}, 512, 0.1),
        ({"base_batch_size": 256}, 512, 0.1),
        ({"lr_scaling": "linear", "base_batch_size": 256}, 256, 0.1),
        ({"lr_scaling": "linear", "base_batch_size": 256}, 512, 0.2),
        ({"lr_scaling": "linear", "base_batch_size": 256}, 64, 0.025),
    ],
)
def test_the_rate_follows_the_effective_batch_only_where_that_is_asked_for(
    options: dict[str, Any], global_batch: int, rate: float
) -> None:
    training = Training(**options, optimizer=Optimizer(lr=0.1))
    assert resolve_learning_rate(training, global_batch) == pytest.approx(rate)


def test_on_another_number_of_devices_a_run_keeps_its_global_batch_and_need_not_divide_it() -> None:
    eight = Batching(world=4, batch_size=2, accumulation=1)
    for world, accumulation in ((1, 4), (2, 2), (3, 2), (4, 1), (8, 1)):
        kept = keep_global_batch(Batching(world, 2, 1), eight.global_batch)
        assert (kept.global_batch, kept.accumulation) == (8, accumulation)
        assert kept.divides == (world in (1, 2, 4))
        assert kept.steps_per_epoch(53) == eight.steps_per_epoch(53)


def test_a_total_that_the_devices_left_do_not_divide_is_kept_by_an_elastic_run() -> None:
    training = Training(batch_size=2, total_batch_size=8)
    assert resolve_batching(training, 3, elastic=True).global_batch == 8
    with pytest.raises(ConfigError):
        resolve_batching(training, 3)
