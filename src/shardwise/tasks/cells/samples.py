"""Cells as training data: in memory, or streamed from files larger than it. Both hand out the same batches of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shardwise.config.seeds import Purpose
from shardwise.data import BatchedSamples, GlobalOrder
from shardwise.data.stream import StreamOrder
from shardwise.tasks.cells.rows import CellSource, Ints, SparseRows
from shardwise.tasks.cells.tokens import CellBatch, CellTokenizer, join_batches

LINE = 512
"""Streaming reads this many rows at a time, side by side in the file."""


@dataclass(frozen=True)
class Split:
    """Which rows are held out for validation: one from each of equally long stretches of the files, by the seed."""

    rows: int
    held_out: Ints

    @classmethod
    def of(cls, rows: int, fraction: float, at_most: int, seed: int) -> Split:
        count = max(1, min(round(rows * fraction), at_most, rows - 1))
        edges = np.arange(count + 1) * rows // count
        inside = np.random.default_rng([seed, Purpose.SPLIT]).random(count) * np.diff(edges)
        return cls(rows, edges[:-1] + inside.astype(np.int64))

    @property
    def kept(self) -> int:
        return self.rows - len(self.held_out)

    def training_rows(self, ids: Ints) -> Ints:
        """The row of each training sample: those held out are skipped over."""
        kept_before = self.held_out - np.arange(len(self.held_out))
        return ids + np.searchsorted(kept_before, ids, side="right")


class CellsInMemory(BatchedSamples):
    def __init__(self, rows: SparseRows, cells: Ints, tokenizer: CellTokenizer, labels: Ints | None = None) -> None:
        self.rows, self.cells, self.tokenizer, self.labels = rows, cells, tokenizer, labels

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, ids: Sequence[int], epoch: int) -> CellBatch:
        chosen = np.asarray(ids, np.int64)
        batch = self.tokenizer.encode(self.rows.take(chosen), self.cells[chosen], epoch)
        if self.labels is not None:
            batch["labels"] = torch.from_numpy(self.labels[chosen])
        return batch

    def join(self, parts: list[CellBatch]) -> CellBatch:
        return join_batches(parts)


class StreamedCells(BatchedSamples):
    """Training cells, read as they are needed. In memory are the rows of the current window that this worker uses."""

    in_regions = True

    def __init__(
        self, source: CellSource, split: Split, tokenizer: CellTokenizer, *, chunk: int, buffer: int, seed: int
    ) -> None:
        self.source, self.split, self.tokenizer = source, split, tokenizer
        self._order = StreamOrder(split.kept, seed, chunk=chunk, buffer=buffer)
        self._lines = _Lines(source)

    def __len__(self) -> int:
        return self.split.kept

    def order(self, seed: int) -> GlobalOrder:
        return self._order

    def read(self, ids: Sequence[int], epoch: int) -> CellBatch:
        rows, sparse = self.rows(np.asarray(ids, np.int64), epoch)
        return self.tokenizer.encode(sparse, self.source.numbers(rows), epoch)

    def rows(self, ids: Ints, epoch: int) -> tuple[Ints, SparseRows]:
        """The cells as they are in the file, and their row numbers."""
        # The larger, the later: windows that come earlier than the first of these are not needed any more.
        time = (epoch << 32) + self._order.windows_of(epoch, ids)
        rows = self.split.training_rows(ids)
        return rows, self._lines.take(rows, time)

    def join(self, parts: list[CellBatch]) -> CellBatch:
        return join_batches(parts)


class _Lines:
    """The lines of the file that are in memory, in one pair of arrays that grow at the end."""

    def __init__(self, source: CellSource) -> None:
        self.source = source
        self._forget()

    def take(self, rows: Ints, time: Ints) -> SparseRows:
        """These rows. A line that was last used before all of `time` makes room."""
        lines = rows // LINE
        missing = np.setdiff1d(lines, self._numbers)
        if len(missing):
            self._let_go(int(time.min()))
            for run in np.split(missing, np.flatnonzero(np.diff(missing) > 1) + 1):
                self._load(int(run[0]), int(run[-1]) + 1)
        index = np.searchsorted(self._numbers, lines)
        np.maximum.at(self._last_used, index, time)
        return self._rows.take(self._first_slot[index] + rows % LINE)

    def _load(self, first: int, last: int) -> None:
        """Lines side by side, in one read."""
        rows = self.source.read(first * LINE, min(last * LINE, len(self.source)))
        numbers = np.arange(first, last)
        self._append(rows, numbers, self._used_rows + (numbers - first) * LINE, np.zeros(len(numbers), np.int64))

    def _let_go(self, time: int) -> None:
        keep = np.flatnonzero(self._last_used >= time)
        if len(keep) == len(self._numbers):
            return
        kept = [(self._numbers[i], self._first_slot[i], self._last_used[i]) for i in keep]
        old = self._rows
        self._forget()
        for number, slot, used in kept:
            count = min(LINE, len(self.source) - int(number) * LINE)
            line = old.take(np.arange(slot, slot + count))
            self._append(line, np.array([number]), np.array([self._used_rows]), np.array([used]))

    def _forget(self) -> None:
        self._numbers = np.empty(0, np.int64)
        self._first_slot = np.empty(0, np.int64)
        self._last_used = np.empty(0, np.int64)
        self._starts = np.zeros(1, np.int64)
        self._genes = np.empty(0, np.int32)
        self._values = np.empty(0, np.float32)
        self._used_rows = self._used = 0

    @property
    def _rows(self) -> SparseRows:
        return SparseRows(self._starts[: self._used_rows + 1], self._genes, self._values)

    def _append(self, rows: SparseRows, numbers: Ints, slots: Ints, used: Ints) -> None:
        end_rows, end = self._used_rows + len(rows), self._used + int(rows.starts[-1])
        self._starts = _grown(self._starts, end_rows + 1)
        self._genes, self._values = _grown(self._genes, end), _grown(self._values, end)
        self._starts[self._used_rows : end_rows + 1] = rows.starts + self._used
        self._genes[self._used : end] = rows.genes
        self._values[self._used : end] = rows.values
        self._used_rows, self._used = end_rows, end
        order = np.argsort(np.append(self._numbers, numbers))
        self._numbers = np.append(self._numbers, numbers)[order]
        self._first_slot = np.append(self._first_slot, slots)[order]
        self._last_used = np.append(self._last_used, used)[order]


def _grown(array: NDArray[Any], size: int) -> NDArray[Any]:
    """With room for `size`: a quarter more each time, so that appending copies little."""
    if size <= len(array):
        return array
    larger = np.empty(max(size, len(array) + len(array) // 4), array.dtype)
    larger[: len(array)] = array
    return larger
