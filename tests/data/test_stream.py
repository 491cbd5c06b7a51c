"""Data that is read in pieces: the same promises as any order, and each rank keeps to its own region."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.config import Batching
from shardwise.data import Cursor, shares
from shardwise.data.stream import STRATA, StreamOrder, evenly_spread

orders = st.builds(
    lambda samples, seed, chunk, buffer: StreamOrder(samples, seed, chunk=chunk, buffer=buffer),
    st.integers(1, 5000),
    st.integers(0, 1000),
    st.integers(1, 300),
    st.integers(1, 3000),
)


@given(st.integers(1, 5000), st.integers(0, 1000))
def test_an_even_spread_is_a_permutation(size: int, seed: int) -> None:
    spread = evenly_spread(size, np.random.default_rng(seed))
    assert sorted(spread.tolist()) == list(range(size))


@given(st.integers(0, 1000), st.integers(0, 10))
def test_samples_that_follow_each_other_lie_in_different_parts_of_the_window(seed: int, level: int) -> None:
    size, together = 4 * STRATA, 1 << level
    spread = evenly_spread(size, np.random.default_rng(seed)).reshape(-1, together)
    parts = np.sort(spread * together // size, axis=1)
    assert (parts == np.arange(together)).all()


def test_an_even_spread_is_random_nonetheless() -> None:
    """Each sample may come at any time: over many seeds, its mean turn is the middle."""
    turns = np.stack([np.argsort(evenly_spread(64, np.random.default_rng(seed))) for seed in range(2000)])
    assert np.abs(turns.mean(axis=0) - 31.5).max() < 2.5  # six standard deviations of the mean
    assert len({tuple(turn) for turn in turns}) == 2000


@settings(deadline=None, max_examples=50)
@given(orders, st.integers(20, 400), st.integers(0, 3))
def test_every_sample_comes_once_per_epoch(order: StreamOrder, batch: int, epoch: int) -> None:
    batches = order.batches(Cursor(epoch, 0), batch, epoch + 1)
    used = list(itertools.chain(*(each.indices.tolist() for each in batches)))
    assert sorted(used) == list(range(order.samples))


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 3000), st.integers(1, 300), st.integers(1, 3000), st.integers(20, 400), st.data())
def test_resuming_anywhere_gives_the_batches_of_the_whole_run(
    samples: int, chunk: int, buffer: int, batch: int, data: st.DataObject
) -> None:
    order, again = (StreamOrder(samples, 7, chunk=chunk, buffer=buffer) for _ in range(2))
    whole = list(order.batches(Cursor(), batch, 2))
    stop = data.draw(st.integers(0, len(whole) - 1))
    rest = list(again.batches(whole[stop].after, batch, 2))
    assert [each.indices.tolist() for each in rest] == [each.indices.tolist() for each in whole[stop + 1 :]]


@settings(deadline=None)
@given(orders, st.integers(0, 3))
def test_the_window_of_a_sample_is_where_the_order_has_it(order: StreamOrder, epoch: int) -> None:
    for position in range(0, order.samples, 97):
        sample = order.part(epoch, position, position + 1)
        assert order.windows_of(epoch, sample).tolist() == [position // order.window]


def test_resuming_computes_only_the_window_it_resumes_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Constant time: a hundred million samples in, what came before is not walked through."""
    computed: list[int] = []
    original = StreamOrder._shuffled_window

    def counted(self: StreamOrder, epoch: int, window: int) -> np.ndarray:
        computed.append(window)
        return original(self, epoch, window)

    monkeypatch.setattr(StreamOrder, "_shuffled_window", counted)
    order = StreamOrder(200_000_000, 0, chunk=10_000, buffer=51_200)
    batch = next(iter(order.batches(Cursor(3, 100_000_000), 64, 4)))
    assert len(batch.indices) == 64
    assert len(computed) <= 2


@pytest.mark.parametrize("world", [2, 3, 4, 8])
@pytest.mark.parametrize("global_batch", [64, 96, 250])
def test_each_rank_reads_about_its_share_of_the_file(world: int, global_batch: int) -> None:
    """Counted in lines of 32 samples, of which a rank reads all if it needs one."""
    order, line = StreamOrder(200_000, 0, chunk=2000, buffer=40_000), 32
    spread = Batching(world, -(-global_batch // world), 1)
    read: list[set[int]] = [set() for _ in range(world)]
    for batch in order.batches(Cursor(), global_batch, 1):
        for rank in range(world):
            for part in shares(batch.indices, spread, rank):
                read[rank].update((part // line).tolist())
    share = [len(lines) * line / order.samples * world for lines in read]
    assert max(share) < 1.2


def test_epochs_and_seeds_differ() -> None:
    seen = {
        tuple(StreamOrder(300, seed, chunk=10, buffer=100).part(epoch, 0, 300)) for seed in (0, 1) for epoch in range(3)
    }
    assert len(seen) == 6


@settings(deadline=None)
@given(orders)
def test_a_batch_is_sorted_by_place_so_that_ranks_may_cut_it(order: StreamOrder) -> None:
    """Within one window, the part of a batch that a lower rank gets comes earlier in the window's chunks."""
    size = min(order.window, 64)
    batch = order.part(0, 0, size)
    sequence = np.argsort(np.concatenate([_chunk(order, chunk) for chunk in order._chunks(0)[0]]))
    assert (np.diff(sequence[batch]) > 0).all()


def _chunk(order: StreamOrder, chunk: int) -> np.ndarray:
    return np.arange(chunk * order.chunk, min((chunk + 1) * order.chunk, order.samples))
