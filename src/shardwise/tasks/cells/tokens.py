"""From sparse rows to tokens and masks, for a whole micro-batch at once.

rank_value             genes from the most to the least expressed; hidden: which gene stands at a rank
binned_expression      each gene with a bin of its expression; hidden: the bin
continuous_projection  each gene with its expression as a number; hidden: the number

Which genes of a cell are hidden follows from (seed, epoch, cell, gene) alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardwise.config.seeds import Purpose
from shardwise.data.seeding import places_of, random_bits
from shardwise.kernels.sizes import packed_size
from shardwise.tasks.cells.config import CellsTokenizer
from shardwise.tasks.cells.rows import Ints, SparseRows

PAD, CLS, MASK, FIRST_GENE = range(4)
NO_BIN, HIDDEN_BIN, FIRST_BIN = range(3)
NOT_HIDDEN = -1
"""In `targets`: nothing is to be predicted here. Bins, genes and expressions are never negative."""
NO_PLACE = -1
"""In `places`, which says for every cell where something is hidden: here is no further place."""

CellBatch = dict[str, Tensor]


@dataclass(frozen=True)
class CellTokenizer:
    options: CellsTokenizer
    genes: int
    """Size of the vocabulary."""
    max_genes: int
    """Genes per cell at most."""
    target_sum: float | None
    """What a cell's values add up to before log1p; None leaves values as they are."""
    seed: int

    @property
    def max_tokens(self) -> int:
        return self.max_genes + self.options.prepend_cls

    def encode(self, rows: SparseRows, cells: Ints, epoch: int) -> CellBatch:
        """Tensors of a row per cell, padded on the right. `cells` says which cells these are. `places`: see hidden_places."""
        table = self._sorted(rows, cells)
        chosen = self._choose(table, cells, epoch)
        return self._shown(table, chosen) | {"cells": torch.from_numpy(cells)}

    def _sorted(self, rows: SparseRows, cells: Ints) -> _Table:
        """The most expressed genes of every cell, in the order of the strategy.

        Many genes of a cell have the same count. Among equals the order is random, a function of the cell: in the order of
        their numbers, a hidden gene could be guessed from its neighbours.
        """
        strategy = self.options.strategy
        values = rows.values.astype(np.float32, copy=False)
        if self.target_sum is not None and strategy != "rank_value":  # scaling a cell does not change its order
            values = _log_normalized(values, rows, self.target_sum)
        too_long = rows.lengths.max(initial=0) > self.max_genes
        lengths = np.minimum(rows.lengths, self.max_genes)
        # One number per gene, and rows of numbers to sort: that is many times faster than sorting one array by another.
        # The bits of a float that is not negative sort like the number; inverted, from large to small.
        bits = values.view(np.uint32)
        if strategy == "continuous_projection" and not too_long:
            return _Table.by_gene(_rows_of(_pair(rows.genes, bits), rows), lengths)
        key = (self.seed, Purpose.SAMPLE, 0, 3)
        falling = _rows_of(_pair(~bits, random_bits(key, cells, rows.genes, repeats=rows.lengths)), rows)
        falling.sort(axis=1)
        falling = np.ascontiguousarray(falling[:, : self.max_genes])
        genes = places_of(key, cells[:, None], falling.astype(np.uint32))
        if strategy == "rank_value":
            return _Table(lengths, genes, None)
        value = (falling >> _HALF).astype(np.uint32)
        shown = _bins(value, lengths, self.options.num_bins) if strategy == "binned_expression" else ~value
        return _Table.by_gene(np.where(falling == _PADDING, _PADDING, _pair(genes, shown)), lengths)

    def _choose(self, table: _Table, cells: Ints, epoch: int) -> _Chosen:
        """Which places are to be predicted, and what is shown there: a function of (seed, epoch, cell, gene)."""
        masking, key = self.options.masking, (self.seed, Purpose.SAMPLE, epoch)
        draw = random_bits((*key, 0), cells[:, None], table.genes)
        draw[~table.real] = 0xFFFFFFFF
        chosen = draw < np.uint32(masking.mask_ratio * 2**32)
        if draw.shape[1]:  # at least one per cell, however few genes it has
            chosen[np.arange(len(draw)), draw.argmin(axis=1)] = table.lengths > 0
        at = np.flatnonzero(chosen)
        cell, gene = cells[at // max(1, draw.shape[1])], table.genes.ravel()[at]
        deed = random_bits((*key, 1), cell, gene) / 2**32
        random = deed < masking.random_replace_ratio
        masked = deed >= masking.random_replace_ratio + masking.keep_ratio
        return _Chosen(at, at[masked], at[random], random_bits((*key, 2), cell[random], gene[random]))

    def _shown(self, table: _Table, chosen: _Chosen) -> CellBatch:
        genes = table.genes.view(np.int32).copy()
        genes += FIRST_GENE
        genes[~table.real] = PAD
        targets = np.full(genes.shape, NOT_HIDDEN, np.int32)
        columns: dict[str, tuple[NDArray[Any], int]] = {"genes": (genes, CLS)}
        if table.shown is None:  # rank_value
            _put(targets, chosen.all, table.genes)
            genes.ravel()[chosen.masked] = MASK
            genes.ravel()[chosen.random] = FIRST_GENE + chosen.bits % np.uint32(self.genes)
        elif self.options.strategy == "binned_expression":
            _put(targets, chosen.all, table.shown)
            bins = table.shown.astype(np.int32)
            bins += FIRST_BIN
            bins[~table.real] = NO_BIN
            bins.ravel()[chosen.masked] = HIDDEN_BIN
            bins.ravel()[chosen.random] = FIRST_BIN + chosen.bits % np.uint32(self.options.num_bins)
            columns["bins"] = (bins, NO_BIN)
        else:
            expression = table.shown.view(np.float32).copy()
            expression[~table.real] = 0
            targets = np.full(genes.shape, NOT_HIDDEN, np.float32)
            _put(targets, chosen.all, expression)
            values, hidden = expression.copy(), np.zeros(genes.shape, np.bool_)
            # In place of a random number, that of another gene of the same cell.
            row = chosen.random // max(1, genes.shape[1])
            other = chosen.bits % table.lengths[row]
            values.ravel()[chosen.random] = expression[row, other]
            values.ravel()[chosen.masked] = 0
            hidden.ravel()[chosen.masked] = True
            columns |= {"values": (values, 0), "hidden": (hidden, 0)}
        columns["targets"] = (targets, NOT_HIDDEN)
        if self.options.prepend_cls:
            shown = {name: _with_first(array, first) for name, (array, first) in columns.items()}
        elif genes.shape[1]:
            shown = {name: array for name, (array, _) in columns.items()}
        else:  # no cell has a gene: one token of padding, as there must be something to compute on
            shown = {name: _with_first(array, _FILLING.get(name, 0)) for name, (array, _) in columns.items()}
        shown["places"] = hidden_places(shown["targets"])
        return {name: torch.from_numpy(array) for name, array in shown.items()}


_FILLING = {"targets": NOT_HIDDEN, "places": NO_PLACE}
"""What stands where a row has nothing; elsewhere it is 0."""
_HALF = np.uint64(32)
_PADDING = np.uint64(0xFFFFFFFFFFFFFFFF)
"""Sorts behind everything else."""


@dataclass(frozen=True)
class _Table:
    """The genes of a row of cells, a row for each; what is beyond a cell's length is padding."""

    lengths: Ints
    genes: NDArray[np.uint32]
    shown: NDArray[np.uint32] | None
    """The bin, or the bits of the expression; nothing where the order tells it."""

    @classmethod
    def by_gene(cls, pairs: NDArray[np.uint64], lengths: Ints) -> _Table:
        """Sorted by gene, so that the place in the row does not tell what is hidden."""
        pairs.sort(axis=1)
        return cls(lengths, (pairs >> _HALF).astype(np.uint32), pairs.astype(np.uint32))

    @cached_property
    def real(self) -> NDArray[np.bool_]:
        return np.arange(self.genes.shape[1]) < self.lengths[:, None]


@dataclass(frozen=True)
class _Chosen:
    """Places in the table: all that are to be predicted, and those of them shown as MASK or as something else."""

    all: Ints
    masked: Ints
    random: Ints
    bits: NDArray[np.uint32]
    """Random bits for each of `random`."""


def _pair(high: NDArray[np.integer], low: NDArray[np.integer]) -> NDArray[np.uint64]:
    return high.astype(np.uint64) << _HALF | low.astype(np.uint64)


def _rows_of(values: NDArray[np.uint64], rows: SparseRows) -> NDArray[np.uint64]:
    """A row per cell, padded."""
    lengths = rows.lengths
    table = np.full((len(rows), int(lengths.max(initial=0))), _PADDING)
    table[np.arange(table.shape[1]) < lengths[:, None]] = values
    return table


def _log_normalized(values: NDArray[np.float32], rows: SparseRows, target: float) -> NDArray[np.float32]:
    before = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
    total = before[rows.starts[1:]] - before[rows.starts[:-1]]
    scale = np.divide(target, total, out=np.zeros_like(total), where=total > 0)
    return np.log1p(values * np.repeat(scale, rows.lengths).astype(np.float32))


def _bins(falling: NDArray[np.uint32], lengths: Ints, bins: int) -> NDArray[np.uint32]:
    """Bins of equal size among the genes of a cell, 0 for the least expressed; equal values share the upper bin."""
    place = np.arange(falling.shape[1])
    first_of_equals = np.ones(falling.shape, bool)
    first_of_equals[:, 1:] = falling[:, 1:] != falling[:, :-1]
    above = np.maximum.accumulate(np.where(first_of_equals, place, 0), axis=1)
    length = np.maximum(lengths, 1)[:, None]
    # floor(below × bins ÷ length). The half keeps the product of floats away from whole numbers, where rounding would matter.
    return ((np.maximum(length - 1 - above, 0) * bins + 0.5) * (1 / length)).astype(np.uint32)


def _put(into: NDArray[Any], places: Ints, values: NDArray[Any]) -> None:
    into.ravel()[places] = values.ravel()[places]


def _with_first(array: NDArray[Any], first: int) -> NDArray[Any]:
    wider = np.empty((len(array), array.shape[1] + 1), array.dtype)
    wider[:, 0] = first
    wider[:, 1:] = array
    return wider


def hidden_places(targets: NDArray[Any]) -> Ints:
    """For every row, where something is to be predicted, then NO_PLACE: known on the host, so that nobody waits for a device
    to count them. One place more than any row needs, at least, and few different widths."""
    row, column = np.nonzero(targets >= 0)
    number = np.bincount(row, minlength=len(targets))
    places = np.full((len(targets), _width_of(number)), NO_PLACE, np.int64)
    places[np.arange(places.shape[1]) < number[:, None]] = column
    return places


def _width_of(hidden: Ints) -> int:
    return packed_size([int(hidden.max(initial=0))])


def revealed(batch: CellBatch) -> CellBatch:
    """The same cells with nothing hidden."""
    targets = batch["targets"]
    chosen = targets >= 0
    if "values" in batch:
        return batch | {
            "values": torch.where(chosen, targets, batch["values"]),
            "hidden": torch.zeros_like(batch["hidden"]),
        }
    name, first = ("bins", FIRST_BIN) if "bins" in batch else ("genes", FIRST_GENE)
    return batch | {name: torch.where(chosen, targets + first, batch[name])}


def join_batches(parts: Sequence[CellBatch]) -> CellBatch:
    """Batches of different width as one. In NumPy, whose small operations cost a tenth of PyTorch's."""
    if len(parts) == 1:
        return parts[0]
    joined: dict[str, NDArray[Any]] = {}
    for name in parts[0]:
        arrays = [part[name].numpy() for part in parts]
        if arrays[0].ndim == 1:
            joined[name] = np.concatenate(arrays)
            continue
        width = max(array.shape[1] for array in arrays)
        whole = joined[name] = np.empty((sum(map(len, arrays)), width), arrays[0].dtype)
        row = 0
        for array in arrays:
            rows, columns = array.shape
            whole[row : row + rows, :columns] = array
            whole[row : row + rows, columns:] = _FILLING.get(name, 0)
            row += rows
    return {name: torch.from_numpy(array) for name, array in joined.items()}


def split_batch(batch: CellBatch, sizes: list[int]) -> list[CellBatch]:
    """The reverse: every part as wide as its longest cell."""
    if len(sizes) == 1:
        return [batch]
    arrays = {name: tensor.numpy() for name, tensor in batch.items()}
    lengths = np.count_nonzero(arrays["genes"] != PAD, axis=1)
    hidden = np.count_nonzero(arrays["places"] != NO_PLACE, axis=1)
    parts = []
    for first, last in itertools.pairwise(np.cumsum([0, *sizes]).tolist()):
        tokens, places = int(lengths[first:last].max(initial=1)), _width_of(hidden[first:last])
        part = {}
        for name, array in arrays.items():
            width = places if name == "places" else tokens
            part[name] = torch.from_numpy(array[first:last] if array.ndim == 1 else array[first:last, :width])
        parts.append(part)
    return parts
