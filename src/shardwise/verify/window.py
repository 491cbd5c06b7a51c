"""The few samples that every run of the proof trains on, and in which order they come."""

from __future__ import annotations

import numpy as np

from shardwise.config import Batching
from shardwise.data import GlobalOrder
from shardwise.data.order import Indices


class Window(GlobalOrder):
    """The last samples of every epoch's order, as if they were all: a few steps then see the end of an epoch.

    `of_ranks`: one process computes the micro-batches that ranks with this batching would. `reorder`: samples change places,
    within a micro-batch of the ranks, or else within a global batch.
    """

    def __init__(
        self, whole: GlobalOrder, samples: int, *, of_ranks: Batching | None = None, reorder: int | None = None
    ) -> None:
        super().__init__(samples, whole.seed)
        self.whole, self.of_ranks, self.reorder = whole, of_ranks, reorder

    @property
    def name(self) -> str:
        return self.whole.name

    def part(self, epoch: int, begin: int, end: int) -> Indices:
        first = self.whole.samples - self.samples
        ids = self.whole.part(epoch, first + begin, first + end)
        return ids if self.of_ranks else self._reordered(ids, epoch, begin)

    def shares(self, indices: Indices, batching: Batching, rank: int) -> list[Indices]:
        if self.of_ranks is None:
            return super().shares(indices, batching, rank)
        share = super().shares
        every = [part for each in range(self.of_ranks.world) for part in share(indices, self.of_ranks, each)]
        return [self._reordered(part, *part) for part in every if len(part)]

    def _reordered(self, ids: Indices, *where: int) -> Indices:
        return ids if self.reorder is None else np.random.default_rng([self.reorder, *where]).permutation(ids)
