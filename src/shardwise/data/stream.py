"""The global order of data that is read in pieces: files larger than memory, shuffled as they are read.

An epoch shuffles chunks of neighbouring samples, then the samples within a window of many chunks. It is a function of
the seed and the epoch, like any order here: position p is found without walking through what comes before it.

Within a window the order is a random one of a special kind: any few samples that follow each other are spread evenly
over the window. A global batch, sorted by place in its window, can therefore be cut into equal parts for the ranks and
their workers so that each keeps to its own region of the window, on any number of ranks, and reads nothing else.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from shardwise.config.seeds import Purpose
from shardwise.data.order import GlobalOrder, Indices

STRATA = 1024
"""A power of two, at least the size of most global batches."""


class StreamOrder(GlobalOrder):
    def __init__(self, samples: int, seed: int, *, chunk: int, buffer: int) -> None:
        super().__init__(samples, seed)
        self.chunk = min(chunk, samples)
        # A multiple of STRATA where there is room for it: then every window is spread perfectly evenly.
        buffer = max(buffer, self.chunk)
        self.window = min(buffer - buffer % STRATA or buffer, samples)
        self._chunks = lru_cache(maxsize=2)(self._shuffled_chunks)
        self._places = lru_cache(maxsize=2)(self._shuffled_window)

    @property
    def name(self) -> str:
        return f"streamed in chunks of {self.chunk}, shuffled in windows of {self.window}"

    def part(self, epoch: int, begin: int, end: int) -> Indices:
        """Sorted by place in the window, so that ranks may take neighbouring parts of it."""
        first = begin // self.window * self.window
        if end <= first + self.window:
            inside = np.sort(self._places(epoch, begin // self.window)[begin - first : end - first])
            return self._sample_at(epoch, first + inside)
        ids, places = [], []
        for window in range(begin // self.window, (end - 1) // self.window + 1):
            first = window * self.window
            inside = self._places(epoch, window)[max(0, begin - first) : end - first]
            ids.append(self._sample_at(epoch, first + inside))
            places.append(inside / self._size(window))
        return np.concatenate(ids)[np.argsort(np.concatenate(places), kind="stable")]

    def windows_of(self, epoch: int, ids: Indices) -> Indices:
        """In which window of the epoch each sample comes."""
        order, starts = self._chunks(epoch)
        turn = np.empty_like(order)
        turn[order] = np.arange(len(order))
        return (starts[turn[ids // self.chunk]] + ids % self.chunk) // self.window

    def _sample_at(self, epoch: int, positions: Indices) -> Indices:
        order, starts = self._chunks(epoch)
        turn = np.searchsorted(starts, positions, side="right") - 1
        return order[turn] * self.chunk + positions - starts[turn]

    def _shuffled_chunks(self, epoch: int) -> tuple[Indices, Indices]:
        """The order of the chunks, and the position at which each begins: the last chunk of the file may be short."""
        count = -(-self.samples // self.chunk)
        order = np.random.default_rng([self.seed, Purpose.ORDER, epoch]).permutation(count)
        sizes = np.minimum(self.chunk, self.samples - order * self.chunk)
        return order, np.cumsum(sizes) - sizes

    def _shuffled_window(self, epoch: int, window: int) -> Indices:
        return evenly_spread(self._size(window), np.random.default_rng([self.seed, Purpose.ORDER, epoch, 1 + window]))

    def _size(self, window: int) -> int:
        return min(self.window, self.samples - window * self.window)


def evenly_spread(size: int, rng: np.random.Generator) -> Indices:
    """A random permutation of range(size) in which neighbours are far apart.

    Two that follow each other lie in different halves, four in different quarters, and so on up to STRATA: a van der
    Corput sequence, scrambled at random at every level (Owen's scrambling), so that what comes when is left to chance.
    """
    levels = min(STRATA.bit_length() - 1, (size - 1).bit_length())
    strata = 1 << levels
    rounds = -(-size // strata)
    turn = np.arange(strata)
    place = np.zeros((rounds, strata), np.int64)
    for level in range(levels):
        flips = rng.integers(0, 2, size=(rounds, 1 << level))
        place = 2 * place + (turn >> level & 1 ^ np.take_along_axis(flips, place, axis=1))
    # Each round takes one sample from every stratum; which one is drawn without replacement.
    drawn = rng.permuted(np.tile(np.arange(rounds), (strata, 1)), axis=1)
    spread = (place * rounds + drawn[place, np.arange(rounds)[:, None]]).ravel()
    return spread[spread < size]
