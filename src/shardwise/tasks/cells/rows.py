"""Cells as they are handed around: sparse rows, genes and values side by side."""

from __future__ import annotations

import itertools
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

Ints = NDArray[np.int64]
Opened = TypeVar("Opened")
LARGEST_INT32 = np.iinfo(np.int32).max


@dataclass(frozen=True)
class SparseRows:
    """Some cells, each with the genes it expresses. Genes are numbers of the vocabulary."""

    starts: Ints
    """Where each cell begins in `genes` and `values`, and, last, where the last one ends."""
    genes: NDArray[np.integer]
    values: NDArray[np.floating | np.integer]

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> Ints:
        return np.diff(self.starts)

    def take(self, rows: Ints) -> SparseRows:
        if self.starts[-1] > LARGEST_INT32:
            return self._take_by_place(rows)
        found = self._matrix[rows]
        return SparseRows(found.indptr.astype(np.int64), found.indices, found.data)

    @cached_property
    def _matrix(self) -> Any:
        """SciPy copies row by row, four times as fast as a place for every single gene. It shares these arrays."""
        shape = len(self), np.iinfo(np.int32).max
        return sparse.csr_array((self.values, self.genes, self.starts), shape=shape, copy=False)

    def _take_by_place(self, rows: Ints) -> SparseRows:
        """For arrays so long that SciPy would need 64 bits per gene, and copy them all to get there."""
        lengths = self.starts[rows + 1] - self.starts[rows]
        starts = starts_of(lengths)
        where = np.arange(starts[-1]) + np.repeat(self.starts[rows] - starts[:-1], lengths)
        return SparseRows(starts, self.genes.take(where), self.values.take(where))  # faster than by index


def starts_of(lengths: Ints) -> Ints:
    starts = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=starts[1:])
    return starts


def stack(parts: Sequence[SparseRows]) -> SparseRows:
    return SparseRows(
        starts_of(np.concatenate([part.lengths for part in parts])),
        np.concatenate([part.genes for part in parts]),
        np.concatenate([part.values for part in parts]),
    )


class CellSource(Protocol):
    """Where cells come from: files on disk, read in pieces. Rows are numbered over all files."""

    origin: str
    """Two sources of the same cells that have the same origin number them alike."""

    def __len__(self) -> int: ...

    def read(self, first: int, last: int) -> SparseRows:
        """The rows from `first` to `last`, the latter not included."""

    def numbers(self, rows: Ints) -> Ints:
        """What tells a cell from all others, in every copy of the data."""

    def labels(self) -> tuple[Ints, list[str]] | None:
        """A label for every row, as a number (-1: none), and the names; None where there are no labels."""


class SeveralFiles(ABC, Generic[Opened]):
    """What sources of several files have in common: rows numbered over all of them, and files that every process opens
    itself, because handles do not survive a fork."""

    def __init__(self, cells: Sequence[int]) -> None:
        self.bounds = starts_of(np.array(cells, np.int64))
        self._open: dict[int, Opened] = {}
        self._owner = os.getpid()

    def __len__(self) -> int:
        return int(self.bounds[-1])

    def read(self, first: int, last: int) -> SparseRows:
        parts = [
            self._read_one(number, max(first - start, 0), min(last, end) - start)
            for number, (start, end) in enumerate(itertools.pairwise(self.bounds.tolist()))
            if first < end and last > start
        ]
        return parts[0] if len(parts) == 1 else stack(parts)

    @abstractmethod
    def _read_one(self, number: int, first: int, last: int) -> SparseRows:
        """Rows of one file, numbered within it."""

    @abstractmethod
    def _open_one(self, number: int) -> Opened: ...

    def _opened(self, number: int) -> Opened:
        if self._owner != os.getpid():
            self._open, self._owner = {}, os.getpid()
        if number not in self._open:
            self._open[number] = self._open_one(number)
        return self._open[number]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}


def gather(source: CellSource, rows: Ints, *, gap: int = 64, at_once: int = 8192) -> SparseRows:
    """Single rows, in ascending order. Those close together are read in one go, but never more than `at_once` rows."""
    far = np.diff(rows) > gap
    elsewhere = np.diff(rows // at_once) > 0
    parts = [
        source.read(int(run[0]), int(run[-1]) + 1).take(run - run[0])
        for run in np.split(rows, np.flatnonzero(far | elsewhere) + 1)
        if len(run)
    ]
    return stack(parts)
