"""One order for everybody: the number of ranks changes who computes a sample, never which samples make up a step."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardwise.config import Batching
from shardwise.data import Cursor, GlobalOrder, shares

sample_counts = st.integers(1, 200)
worlds = st.integers(1, 9)
batchings = st.builds(Batching, worlds, batch_size=st.integers(1, 7), accumulation=st.integers(1, 4))
seeds = st.integers(0, 2**31 - 1)


def global_batches(
    samples: int, seed: int, global_batch: int, epochs: int, start: Cursor | None = None
) -> list[list[int]]:
    order = GlobalOrder(samples, seed)
    return [batch.indices.tolist() for batch in order.batches(start or Cursor(), global_batch, epochs)]


@given(sample_counts, batchings, seeds)
def test_every_sample_is_used_exactly_once_per_epoch(samples: int, batching: Batching, seed: int) -> None:
    order = GlobalOrder(samples, seed)
    used: dict[int, list[int]] = {0: [], 1: []}
    for batch in order.batches(Cursor(), batching.global_batch, epochs=2):
        for rank in range(batching.world):
            for part in shares(batch.indices, batching, rank):
                used[batch.epoch] += part.tolist()
    assert sorted(used[0]) == sorted(used[1]) == list(range(samples))


@given(sample_counts, batchings, seeds)
def test_the_shares_of_all_ranks_are_the_global_batch_for_any_number_of_ranks(
    samples: int, batching: Batching, seed: int
) -> None:
    """As sets: within a step the order has no meaning, for the loss is a sum."""
    for batch in GlobalOrder(samples, seed).batches(Cursor(), batching.global_batch, epochs=1):
        for world in range(1, 6):
            spread = Batching(world, batching.batch_size, batching.accumulation)
            parts = [part.tolist() for rank in range(world) for part in shares(batch.indices, spread, rank)]
            assert sorted(itertools.chain(*parts)) == sorted(batch.indices.tolist())


@given(sample_counts, batchings)
def test_all_ranks_have_the_same_number_of_micro_batches_and_none_is_too_big(samples: int, batching: Batching) -> None:
    for batch in GlobalOrder(samples, 0).batches(Cursor(), batching.global_batch, epochs=1):
        parts = [shares(batch.indices, batching, rank) for rank in range(batching.world)]
        numbers = {len(mine) for mine in parts}
        assert len(numbers) == 1
        assert 1 <= numbers.pop() <= batching.accumulation
        assert all(len(part) <= batching.batch_size for mine in parts for part in mine)


@given(sample_counts, batchings)
def test_shares_differ_by_at_most_one_sample(samples: int, batching: Batching) -> None:
    for batch in GlobalOrder(samples, 0).batches(Cursor(), batching.global_batch, epochs=1):
        parts = [shares(batch.indices, batching, rank) for rank in range(batching.world)]
        micro = [len(part) for mine in parts for part in mine]
        per_rank = [sum(map(len, mine)) for mine in parts]
        assert max(micro) - min(micro) <= 1
        assert max(per_rank) - min(per_rank) <= 1


@given(sample_counts, batchings)
def test_a_short_batch_takes_no_more_micro_batches_than_hold_it(samples: int, batching: Batching) -> None:
    indices = np.arange(min(samples, batching.global_batch))
    rounds = len(shares(indices, batching, 0))
    assert (rounds - 1) * batching.world * batching.batch_size < len(indices)


@given(sample_counts, seeds, st.integers(1, 50), worlds, st.data())
def test_resuming_anywhere_on_another_number_of_ranks_yields_the_rest(
    samples: int, seed: int, global_batch: int, world: int, data: st.DataObject
) -> None:
    order = GlobalOrder(samples, seed)
    batches = list(order.batches(Cursor(), global_batch, epochs=3))
    stop = data.draw(st.integers(0, len(batches) - 1), label="the run is killed after this step")
    cursor = batches[stop].after
    rest = list(order.batches(cursor, global_batch, epochs=3))
    assert [(batch.epoch, batch.after) for batch in rest] == [(b.epoch, b.after) for b in batches[stop + 1 :]]
    spread = Batching(world, batch_size=3, accumulation=20)
    for again, expected in zip(rest, batches[stop + 1 :], strict=True):
        parts = [part for rank in range(world) for part in shares(again.indices, spread, rank)]
        assert sorted(np.concatenate(parts).tolist()) == sorted(expected.indices.tolist())


@given(sample_counts, seeds, st.integers(1, 50), st.integers(1, 50), st.data())
def test_resuming_with_another_batch_size_loses_and_repeats_nothing(
    samples: int, seed: int, before: int, after: int, data: st.DataObject
) -> None:
    batches = list(GlobalOrder(samples, seed).batches(Cursor(), before, epochs=2))
    stop = data.draw(st.integers(0, len(batches) - 1), label="stop")
    done = [index for batch in batches[: stop + 1] for index in batch.indices.tolist()]
    rest = list(itertools.chain(*global_batches(samples, seed, after, 2, batches[stop].after)))
    assert done + rest == list(itertools.chain(*global_batches(samples, seed, before, 2)))


def test_the_cursor_after_the_last_step_of_an_epoch_is_the_start_of_the_next() -> None:
    cursors = [batch.after for batch in GlobalOrder(10, 0).batches(Cursor(), 4, epochs=2)]
    assert cursors == [Cursor(0, 4), Cursor(0, 8), Cursor(1, 0), Cursor(1, 4), Cursor(1, 8), Cursor(2, 0)]
    assert not list(GlobalOrder(10, 0).batches(cursors[-1], 4, epochs=2))


@given(seeds)
def test_epochs_differ_and_so_do_seeds(seed: int) -> None:
    # 50 samples have so many orders that no two of these are the same by chance
    order, other = GlobalOrder(50, seed), GlobalOrder(50, seed + 1)
    seen = {tuple(each.part(epoch, 0, 50)) for epoch in range(4) for each in (order, other)}
    assert len(seen) == 8


@given(sample_counts, seeds, st.integers(0, 5))
def test_the_order_depends_on_the_seed_and_the_epoch_only(samples: int, seed: int, epoch: int) -> None:
    np.random.seed(1)
    first = GlobalOrder(samples, seed).part(epoch, 0, samples)
    np.random.seed(2)
    later = GlobalOrder(samples, seed)
    later.part(0, 0, samples)
    assert first.tolist() == later.part(epoch, 0, samples).tolist()


def test_without_shuffling_the_order_is_that_of_the_data() -> None:
    order = GlobalOrder(7, 3, shuffle=False)
    assert [batch.indices.tolist() for batch in order.batches(Cursor(), 3, epochs=1)] == [[0, 1, 2], [3, 4, 5], [6]]
