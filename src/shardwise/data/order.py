"""One global order per epoch, from the seed alone.

The number of ranks, workers or micro-batches changes who computes a sample, never which samples make up a step.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwise.config import Batching
from shardwise.config.seeds import Purpose

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Cursor:
    """Where the run is: resumes on any number of ranks, because it counts samples and not batches of a rank."""

    epoch: int = 0
    consumed: int = 0


@dataclass(frozen=True)
class GlobalBatch:
    """The samples of one optimizer step, over all ranks; `after` is the cursor once they have been used."""

    indices: Indices
    epoch: int
    after: Cursor


class GlobalOrder:
    """Any sample may come anywhere. Data that must be read in pieces has an order of its own: see stream.py."""

    def __init__(self, samples: int, seed: int, *, shuffle: bool = True) -> None:
        self.samples = samples
        self.seed = seed
        self.shuffle = shuffle
        self._epoch = -1
        self._permutation: Indices = np.empty(0, np.int64)

    @property
    def name(self) -> str:
        """Two orders of the same samples and seed that have the same name are the same order."""
        return "shuffled" if self.shuffle else "as it is"

    def part(self, epoch: int, begin: int, end: int) -> Indices:
        """The samples at the positions from `begin` to `end` of an epoch."""
        if not self.shuffle:
            return np.arange(begin, end)
        if epoch != self._epoch:
            rng = np.random.default_rng([self.seed, Purpose.ORDER, epoch])
            self._epoch, self._permutation = epoch, rng.permutation(self.samples)
        return self._permutation[begin:end]

    def batches(self, start: Cursor, global_batch: int, epochs: int) -> Iterator[GlobalBatch]:
        """Every global batch from the cursor to the end of the last epoch. The last of an epoch may be short."""
        for epoch in range(start.epoch, epochs):
            first = start.consumed if epoch == start.epoch else 0
            for begin in range(first, self.samples, global_batch):
                end = min(begin + global_batch, self.samples)
                after = Cursor(epoch, end) if end < self.samples else Cursor(epoch + 1, 0)
                yield GlobalBatch(self.part(epoch, begin, end), epoch, after)

    def shares(self, indices: Indices, batching: Batching, rank: int) -> list[Indices]:
        """A rank's micro-batches of a global batch of this order."""
        return shares(indices, batching, rank)


def shares(indices: Indices, batching: Batching, rank: int) -> list[Indices]:
    """This rank's micro-batches of a global batch.

    A short batch is spread as evenly as it goes, over as few micro-batches as hold it. Every rank gets the same
    number of micro-batches, so that all take part in the same collectives; some may be empty. A rank's samples stand
    side by side in the global batch: where that is sorted by place in the file, a rank reads its own part of the file.
    """
    rounds = max(1, math.ceil(len(indices) / (batching.world * batching.batch_size)))
    return cut(cut(indices, batching.world)[rank], rounds)


def cut(indices: Indices, parts: int) -> list[Indices]:
    """Into parts whose sizes differ by at most one; the larger ones first."""
    size, larger = divmod(len(indices), parts)
    edges = [number * size + min(number, larger) for number in range(parts + 1)]
    return [indices[first:last] for first, last in itertools.pairwise(edges)]
