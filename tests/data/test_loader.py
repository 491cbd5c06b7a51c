"""Workers and ranks change who reads a sample, never what is read."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardwise.config import Batching, DataBlock
from shardwise.data import Cursor, GlobalOrder, Reader, StepBatch, StepLoader
from shardwise.data.seeding import places_of, random_bits
from shardwise.errors import DataError

CPU = torch.device("cpu")


class Squares:
    """Sample i is (i, i²)."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, index * index


class Augmented(Squares):
    """Draws from every generator that a data set may use."""

    def __getitem__(self, index: int) -> Any:
        return index, random.random(), float(np.random.rand()), float(torch.rand(()))


class Unreadable(Squares):
    def __init__(self, number: int, broken: int, error: Exception) -> None:
        super().__init__(number)
        self.broken, self.error = broken, error

    def __getitem__(self, index: int) -> tuple[int, int]:
        if index == self.broken:
            raise self.error
        return super().__getitem__(index)


def collate(samples: list[Any]) -> Tensor:
    return torch.tensor(samples, dtype=torch.float64)


def load(
    samples: Any,
    batching: Batching,
    *,
    rank: int = 0,
    workers: int = 0,
    epochs: int = 1,
    seed: int = 5,
    start: Cursor | None = None,
) -> list[StepBatch]:
    reader = Reader(samples, collate, len, seed)
    order = GlobalOrder(len(samples), seed)
    options = DataBlock(num_workers=workers)
    return list(StepLoader(reader, order, batching, rank, CPU, options, start=start, epochs=epochs))


def by_sample(steps: list[StepBatch]) -> dict[tuple[int, int], list[float]]:
    """(epoch, sample) → what was read, over the micro-batches that count."""
    read: dict[tuple[int, int], list[float]] = {}
    for step in steps:
        for micro in step.micro:
            if not micro.request.borrowed:
                for index, row in zip(micro.request.ids, micro.inputs.tolist(), strict=True):
                    assert row[0] == index
                    read[step.epoch, index] = row[1:]
    return read


def test_any_number_of_workers_gives_the_same_steps() -> None:
    batching = Batching(world=2, batch_size=3, accumulation=2)
    alone, one, two = (load(Augmented(29), batching, workers=workers, epochs=2) for workers in (0, 1, 2))
    assert len(alone) == 6
    for other in (one, two):
        assert [step.ids for step in other] == [step.ids for step in alone]
        assert [(s.epoch, s.after, s.samples, s.count) for s in other] == [
            (s.epoch, s.after, s.samples, s.count) for s in alone
        ]
        for mine, theirs in zip(alone, other, strict=True):
            for micro, same in zip(mine.micro, theirs.micro, strict=True):
                assert torch.equal(micro.inputs, same.inputs)


@given(
    samples=st.integers(1, 60),
    world=st.integers(1, 5),
    batch_size=st.integers(1, 5),
    accumulation=st.integers(1, 3),
)
def test_every_sample_is_read_exactly_once_over_all_ranks(
    samples: int, world: int, batch_size: int, accumulation: int
) -> None:
    assert_exactly_once(samples, Batching(world, batch_size, accumulation), workers=0)


@settings(max_examples=4, deadline=None)  # each example forks world × workers processes
@given(samples=st.integers(1, 30), world=st.integers(1, 3), batch_size=st.integers(1, 4), workers=st.integers(1, 2))
def test_every_sample_is_read_exactly_once_over_all_ranks_and_workers(
    samples: int, world: int, batch_size: int, workers: int
) -> None:
    assert_exactly_once(samples, Batching(world, batch_size, accumulation=2), workers=workers)


def assert_exactly_once(samples: int, batching: Batching, workers: int) -> None:
    ranks = [load(Squares(samples), batching, rank=rank, workers=workers) for rank in range(batching.world)]
    used = Counter(index for steps in ranks for step in steps for index in step.ids)
    assert used == Counter(range(samples))
    assert sum(step.count for steps in ranks for step in steps) == samples
    for together in zip(*ranks, strict=True):
        assert len({len(step.micro) for step in together}) == 1, "all ranks take part in the same collectives"
        assert {step.samples for step in together} == {sum(len(step.ids) for step in together)}
        assert len({step.after for step in together}) == 1
    for steps in ranks:
        for (_, index), values in by_sample(steps).items():
            assert values == [index * index]


def test_what_is_random_in_a_sample_does_not_depend_on_who_reads_it() -> None:
    expected = by_sample(load(Augmented(23), Batching(1, 4, 1), epochs=2))
    assert len(expected) == 46
    for world, batch_size, accumulation, workers in [(1, 23, 1, 0), (2, 2, 3, 0), (3, 1, 1, 0), (2, 3, 1, 2)]:
        batching = Batching(world, batch_size, accumulation)
        read: dict[tuple[int, int], list[float]] = {}
        for rank in range(world):
            read |= by_sample(load(Augmented(23), batching, rank=rank, workers=workers, epochs=2))
        assert read == expected


def test_what_is_random_in_a_sample_is_the_same_after_a_resume() -> None:
    batching = Batching(1, 4, 1)
    whole = load(Augmented(23), batching, epochs=2)
    rest = load(Augmented(23), batching, epochs=2, start=whole[7].after)
    assert by_sample(rest) == by_sample(whole[8:])
    assert len(rest) == len(whole) - 8


def test_what_is_random_differs_between_samples_epochs_and_seeds() -> None:
    read = by_sample(load(Augmented(23), Batching(1, 4, 1), epochs=2))
    other = by_sample(load(Augmented(23), Batching(1, 4, 1), epochs=2, seed=6))
    for generator in range(3):
        drawn = [values[generator] for values in [*read.values(), *other.values()]]
        # torch draws 24 bits: 92 of them are all different for these seeds, and stay so
        assert len(set(drawn)) == 4 * 23


def test_reading_leaves_the_global_generators_as_they_were() -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    expected = random.random(), np.random.rand(), torch.rand(()).item()
    for workers in (0, 1):
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        load(Augmented(11), Batching(1, 2, 2), workers=workers)
        assert (random.random(), np.random.rand(), torch.rand(()).item()) == expected


def test_a_sample_that_fails_leaves_the_global_generators_as_they_were_too() -> None:
    torch.manual_seed(1)
    expected = torch.rand(()).item()
    torch.manual_seed(1)
    with pytest.raises(DataError):
        load(Unreadable(3, 1, ValueError("no")), Batching(1, 1, 1))
    assert torch.rand(()).item() == expected


def test_a_rank_without_a_sample_borrows_one_that_counts_nothing() -> None:
    """Five samples in batches of four leave one for the last step: three ranks of four have none."""
    batching = Batching(world=4, batch_size=1, accumulation=1)
    last = [load(Squares(5), batching, rank=rank)[-1] for rank in range(4)]
    assert [step.count for step in last] == [1, 0, 0, 0]
    owner = last[0].ids
    assert len(owner) == 1
    for step in last[1:]:
        assert step.ids == []
        assert [micro.request.borrowed for micro in step.micro] == [True]
        assert step.micro[0].request.ids == tuple(owner), "it has something to run on"
        assert step.micro[0].inputs.shape == (1, 2)
        assert (step.samples, step.epoch, step.after) == (1, 0, Cursor(1, 0))


def test_a_micro_batch_counts_what_the_task_says() -> None:
    reader = Reader(Squares(10), collate, lambda batch: 7 * len(batch), seed=0)
    steps = StepLoader(reader, GlobalOrder(10, 0), Batching(1, 2, 2), 0, CPU, DataBlock())
    assert [step.count for step in steps] == [28, 28, 14]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_cannot_be_read_is_named(workers: int) -> None:
    samples = Unreadable(20, 13, OSError("the disk is gone"))
    with pytest.raises(DataError) as caught:
        load(samples, Batching(1, 4, 1), workers=workers)
    assert str(caught.value) == "sample 13 of the training data cannot be read: OSError: the disk is gone"


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_set_that_explains_itself_is_quoted_as_it_is(workers: int) -> None:
    samples = Unreadable(20, 13, DataError("games.jsonl, line 14: no key 'text'"))
    with pytest.raises(DataError) as caught:
        load(samples, Batching(1, 4, 1), workers=workers)
    assert str(caught.value) == "games.jsonl, line 14: no key 'text'"


def test_the_name_of_the_data_is_in_the_message() -> None:
    reader = Reader(Unreadable(3, 0, KeyError("x")), collate, len, seed=0, name="validation")
    steps = StepLoader(reader, GlobalOrder(3, 0), Batching(1, 3, 1), 0, CPU, DataBlock())
    with pytest.raises(DataError, match="sample 0 of the validation data cannot be read: KeyError: 'x'"):
        list(steps)


def test_a_batch_keeps_its_shape_on_its_way_to_the_device() -> None:
    """Nested inputs arrive nested: only tensors are moved."""

    def nested(samples: list[Any]) -> dict[str, Any]:
        values = collate(samples)
        return {"x": values, "pair": (values + 1, [values + 2]), "name": "text", "number": 3}

    reader = Reader(Squares(2), nested, lambda batch: 2, seed=0)
    (step,) = StepLoader(reader, GlobalOrder(2, 0, shuffle=False), Batching(1, 2, 1), 0, CPU, DataBlock())
    moved = step.micro[0].to(torch.device("meta")).inputs
    assert moved["x"].is_meta and moved["pair"][0].is_meta and moved["pair"][1][0].is_meta
    assert isinstance(moved["pair"], tuple) and isinstance(moved["pair"][1], list)
    assert (moved["name"], moved["number"]) == ("text", 3)


@given(st.integers(0, 2**40), st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50), st.integers(0, 1000))
def test_random_bits_tell_the_place_they_were_drawn_for(sample: int, places: list[int], seed: int) -> None:
    samples, wanted = np.full(len(places), sample), np.array(places)
    bits = random_bits((seed, 1), samples, wanted)
    assert places_of((seed, 1), samples, bits).tolist() == places


def test_random_bits_are_as_even_as_chance_has_it() -> None:
    bits = random_bits((0,), np.repeat(np.arange(200), 500), np.tile(np.arange(500), 200))
    share = np.unpackbits(bits.view(np.uint8)).mean()
    assert share == pytest.approx(0.5, abs=0.002)
    assert np.bincount(bits >> 28, minlength=16) == pytest.approx(np.full(16, 6250), rel=0.06)
