"""Cells as training data: in memory, or streamed from files larger than it. Both hand out the same batches of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shardwise.config.seeds import Purpose
from shardwise.data import BatchedSamples, GlobalOrder
from shardwise.data.stream import StreamOrder
from shardwise.tasks.cells.layout import laid_out
from shardwise.tasks.cells.rows import CellSource, Ints, SparseRows
from shardwise.tasks.cells.tokens import CellBatch, CellTokenizer, join_batches, split_batch

LINE = 512
"""Streaming reads about this many cells at a time, side by side in the file."""


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


class CellSamples(BatchedSamples):
    tokenizer: CellTokenizer
    packs = False
    """Whether the cells of a micro-batch lie end to end."""

    def finish(self, batch: CellBatch) -> dict[str, Any]:
        return laid_out(batch, packs=self.packs, max_tokens=self.tokenizer.max_tokens)

    def join(self, parts: list[CellBatch]) -> CellBatch:
        return join_batches(parts)

    def take_apart(self, batch: CellBatch, sizes: list[int]) -> list[CellBatch]:
        return split_batch(batch, sizes)


class CellsInMemory(CellSamples):
    def __init__(
        self, rows: SparseRows, cells: Ints, tokenizer: CellTokenizer, labels: Ints | None = None, origin: str = ""
    ) -> None:
        self.rows, self.cells, self.tokenizer, self.labels = rows, cells, tokenizer, labels
        self.origin = origin

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, ids: Ints, epoch: int) -> CellBatch:
        batch = self.tokenizer.encode(self.rows.take(ids), self.cells[ids], epoch)
        if self.labels is not None:
            batch["labels"] = torch.from_numpy(self.labels[ids])
        return batch


class StreamedCells(CellSamples):
    """Training cells, read as they are needed. In memory are the cells of the current window that this worker uses."""

    in_regions = True

    def __init__(
        self, source: CellSource, split: Split, tokenizer: CellTokenizer, *, chunk: int, buffer: int, seed: int
    ) -> None:
        self.source, self.split, self.tokenizer = source, split, tokenizer
        self.origin = source.origin
        self._order = StreamOrder(split.kept, seed, chunk=chunk, buffer=buffer)
        self._lines = _Lines(source, split, self._order.chunk)

    def __len__(self) -> int:
        return self.split.kept

    def order(self, seed: int) -> GlobalOrder:
        return self._order

    def read(self, ids: Ints, epoch: int) -> CellBatch:
        numbers = self.source.numbers(self.split.training_rows(ids))
        return self.tokenizer.encode(self.rows(ids, epoch), numbers, epoch)

    def rows(self, ids: Ints, epoch: int) -> SparseRows:
        """The cells as they are in the file."""
        # The larger, the later: windows that come earlier than the first of these are not needed any more.
        return self._lines.take(ids, (epoch << 32) + self._order.windows_of(epoch, ids))


class _Lines:
    """What is in memory: lines of cells side by side in the file, in one pair of arrays that grow at the end.

    A chunk is a whole number of lines, so that nothing of the chunk beside it is read.
    """

    def __init__(self, source: CellSource, split: Split, chunk: int) -> None:
        self.source, self.split, self.chunk = source, split, chunk
        self.per_chunk = max(1, round(chunk / LINE))
        self.size = -(-chunk // self.per_chunk)
        self._starts = np.zeros(1, np.int64)
        self._genes = np.empty(0, np.int32)
        self._values = np.empty(0, np.float32)
        self._rows = SparseRows(self._starts, self._genes, self._values)
        self._forget()

    def take(self, ids: Ints, time: Ints) -> SparseRows:
        """These cells. A line that was last used before all of `time` makes room."""
        lines = ids // self.chunk * self.per_chunk + ids % self.chunk // self.size
        here = np.isin(self._numbers, lines)
        self._last_used[here] = np.maximum(self._last_used[here], time.max())
        missing = np.setdiff1d(lines, self._numbers)
        if len(missing):
            self._let_go(int(time.min()))
            for run in np.split(missing, np.flatnonzero(np.diff(missing) > 1) + 1):
                self._load(run, int(time.max()))
            self._rows = SparseRows(self._starts[: self._used_rows + 1], self._genes, self._values)
        index = np.searchsorted(self._numbers, lines)
        return self._rows.take(self._first_slot[index] + ids - self._first(lines))

    def _first(self, lines: Ints) -> Ints:
        """The first cell of each line, or, for the line after the last, where that ends."""
        return np.minimum(
            lines // self.per_chunk * self.chunk + np.minimum(lines % self.per_chunk * self.size, self.chunk),
            self.split.kept,
        )

    def _load(self, lines: Ints, time: int) -> None:
        """Lines side by side, in one read."""
        edges = self._first(np.append(lines, lines[-1] + 1))
        rows = self.split.training_rows(np.arange(edges[0], edges[-1]))
        found = self.source.read(int(rows[0]), int(rows[-1]) + 1)
        if len(found) > len(rows):  # some in between are held out
            found = found.take(rows - rows[0])
        self._append(found, lines, self._used_rows + edges[:-1] - edges[0], np.full(len(lines), time))

    def _let_go(self, time: int) -> None:
        keep = np.flatnonzero(self._last_used >= time)
        if len(keep) == len(self._numbers):
            return
        numbers, slots, used, old = self._numbers[keep], self._first_slot[keep], self._last_used[keep], self._rows
        lengths = self._first(numbers + 1) - self._first(numbers)
        kept = [old.take(np.arange(slot, slot + length)) for slot, length in zip(slots, lengths, strict=True)]
        self._forget()
        for position, line in enumerate(kept):
            one = slice(position, position + 1)
            self._append(line, numbers[one], np.array([self._used_rows]), used[one])

    def _forget(self) -> None:
        """The arrays stay: the next window needs as much room as the last."""
        self._numbers = np.empty(0, np.int64)
        self._first_slot = np.empty(0, np.int64)
        self._last_used = np.empty(0, np.int64)
        self._used_rows = self._used = 0

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
