"""What tells cells apart: which genes they express, and how much.

Nearly all cells differ in the first look, at three sums; only those that do not are compared gene by gene.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shardwise.data.overlap import NEVER, Contents, SampleContents
from shardwise.tasks.cells.corpus import Corpus
from shardwise.tasks.cells.h5ad import H5adFiles
from shardwise.tasks.cells.rows import Ints, SparseRows, gather
from shardwise.tasks.cells.samples import CellSamples, CellsInMemory, StreamedCells

STREAMED = 16_384
"""Training cells that are compared where all of them do not fit into memory."""
READ_WHOLE = 30_000
"""Cells that are compared gene by gene, at most: it takes a second."""
_PIECE = 256
"""Of these, cells side by side in the file."""


def cell_contents(corpus: Corpus, train: CellSamples, valid: CellsInMemory) -> SampleContents:
    rows, numbers = _training_rows(corpus, train)
    some = len(rows) < len(train)
    trained, validated = _equal_numbers(rows, valid.rows)
    # Cells that express no gene of the vocabulary are all alike, which says nothing about where they come from.
    kept, held = np.flatnonzero(rows.lengths), np.flatnonzero(valid.rows.lengths)
    named = _names(corpus)
    source = corpus.training
    return SampleContents(
        Contents(trained[kept], lambda place: named(int(numbers[kept[place]]))),
        Contents(validated[held], lambda place: named(int(valid.cells[held[place]]))),
        unit="cells",
        error_above=NEVER,
        held_out=True,
        can_name=False,
        files=[file.path for file in source.files] if isinstance(source, H5adFiles) else (),
        looked_at=f" ({len(rows)} of {len(train)} training cells were compared)" if some else "",
    )


def _training_rows(corpus: Corpus, train: CellSamples) -> tuple[SparseRows, Ints]:
    """Cells to train on, all of them where they are in memory, and their numbers."""
    if isinstance(train, CellsInMemory):
        return train.rows, train.cells
    assert isinstance(train, StreamedCells)
    pieces = max(1, STREAMED // _PIECE)
    starts = np.unique(np.linspace(0, max(0, len(train) - _PIECE), pieces).astype(np.int64))
    ids = np.unique(np.concatenate([np.arange(start, min(start + _PIECE, len(train))) for start in starts]))
    rows = corpus.split.training_rows(ids)
    return gather(corpus.training, rows), corpus.training.numbers(rows)


def _equal_numbers(*parts: SparseRows) -> list[NDArray[np.uint64]]:
    """A number for each cell: two cells of any of the parts have the same one if they are equal."""
    numbers = np.concatenate([_first_look(part) for part in parts])
    order = np.argsort(numbers, kind="stable")
    alike = np.diff(numbers[order]) == 0
    again = np.sort(order[np.append(alike, False) | np.append(False, alike)])
    if len(again) > READ_WHOLE:  # so many are not alike by chance
        again = again[:0]
    edges = np.cumsum([0, *map(len, parts)])
    for part, first, last in zip(parts, edges[:-1], edges[1:], strict=True):
        here = again[(again >= first) & (again < last)]
        for place in here.tolist():
            numbers[place] = _whole(part, place - int(first))
    return [numbers[first:last] for first, last in pairwise(edges)]


def _first_look(rows: SparseRows) -> NDArray[np.uint64]:
    """In whichever order a cell's genes are stored: files differ in that."""
    some = np.flatnonzero(rows.lengths)
    mixed = rows.lengths.astype(np.uint64)
    bits = rows.values.astype(np.float32, copy=False).view(np.uint32)
    for column in (rows.genes, bits) if len(some) else ():
        mixed *= np.uint64(0x9E3779B97F4A7C15)
        mixed[some] ^= np.add.reduceat(column, rows.starts[some], dtype=np.uint64)
        mixed ^= mixed >> np.uint64(29)
    return mixed


def _whole(rows: SparseRows, place: int) -> int:
    begin, end = int(rows.starts[place]), int(rows.starts[place + 1])
    genes, values = rows.genes[begin:end].astype(np.int64), rows.values[begin:end].astype(np.float32)
    order = np.argsort(genes)
    digest = blake2b(genes[order].tobytes(), digest_size=8)
    digest.update(values[order].tobytes())
    return int.from_bytes(digest.digest())


def _names(corpus: Corpus) -> Callable[[int], str]:
    source = corpus.training
    if not isinstance(source, H5adFiles):
        return lambda number: f"cell {number}"
    paths: list[Path] = [file.path for file in source.files]

    def name(number: int) -> str:
        file = int(np.searchsorted(source.bounds, number, side="right")) - 1
        return f"cell {number - int(source.bounds[file])} of {paths[file]}"

    return name
