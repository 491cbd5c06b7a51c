"""From sparse rows to tokens and masks, for a whole micro-batch at once.

rank_value             genes from the most to the least expressed; hidden: which gene stands at a rank
binned_expression      each gene with a bin of its expression; hidden: the bin
continuous_projection  each gene with its expression as a number; hidden: the number

Which genes of a cell are hidden follows from (seed, epoch, cell, gene) alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardwise.config.cells import CellsTokenizer
from shardwise.config.seeds import Purpose
from shardwise.data.seeding import random_bits
from shardwise.tasks.cells.rows import Ints, SparseRows, starts_of

PAD, CLS, MASK, FIRST_GENE = range(4)
NO_BIN, HIDDEN_BIN, FIRST_BIN = range(3)
NOT_HIDDEN = -1
"""In `targets`: nothing is to be predicted here. Bins, genes and expressions are never negative."""

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
        """Tensors of a row per cell, padded on the right. `cells` says which cells these are."""
        if len(rows) > MOST_ROWS:
            parts = np.split(np.arange(len(rows)), range(MOST_ROWS, len(rows), MOST_ROWS))
            return join_batches([self.encode(rows.take(part), cells[part], epoch) for part in parts])
        ragged = self._sorted(rows)
        hidden = self._hide(ragged, cells, epoch)
        return self._padded(ragged, hidden) | {"cells": torch.from_numpy(cells)}

    def _sorted(self, rows: SparseRows) -> _Ragged:
        """The most expressed genes of every cell, in the order of the strategy."""
        values = rows.values.astype(np.float32, copy=False)
        ranks_only = self.options.strategy == "rank_value"
        if self.target_sum is not None and not ranks_only:  # scaling a cell does not change the order of its genes
            values = _log_normalized(values, rows, self.target_sum)
        # One sort of one array: the row in the high bits, then the value from large to small, then the gene. The bits of
        # a float that is not negative sort like the number.
        row_of = np.repeat(np.arange(len(rows), dtype=np.uint64), rows.lengths)
        falling = (~values.view(np.uint32)).astype(np.uint64)
        packed = row_of << _ROW | falling << _VALUE | rows.genes.astype(np.uint64)
        packed.sort()
        lengths, starts = rows.lengths, rows.starts
        rank = np.arange(len(packed)) - np.repeat(starts[:-1], lengths)
        if lengths.max(initial=0) > self.max_genes:
            packed, rank = packed[rank < self.max_genes], rank[rank < self.max_genes]
            lengths = np.minimum(lengths, self.max_genes)
            starts = starts_of(lengths)
        ragged = _Ragged(starts, rank, packed & _GENE_BITS, packed >> _VALUE & _VALUE_BITS, packed >> _ROW)
        return ragged if ranks_only else self._by_gene(ragged)

    def _by_gene(self, ragged: _Ragged) -> _Ragged:
        """Sorted by gene, so that the place in the sequence does not tell what is hidden."""
        shown = ragged.shown ^ _VALUE_BITS
        if self.options.strategy == "binned_expression":
            shown = _bins(ragged, self.options.num_bins)
        packed = ragged.row << _ROW | ragged.genes << np.uint64(32) | shown
        packed.sort()
        genes = packed >> np.uint64(32) & _GENE_BITS
        return _Ragged(ragged.starts, ragged.rank, genes, packed & _VALUE_BITS, ragged.row)

    def _hide(self, ragged: _Ragged, cells: Ints, epoch: int) -> _Hidden:
        masking = self.options.masking
        key = (self.seed, Purpose.SAMPLE, epoch)
        bits = random_bits(key, cells[ragged.row.astype(np.int64)], ragged.genes)
        choice, action = bits >> np.uint64(32), bits & np.uint64(0xFFFFFFFF)
        chosen = choice < np.uint64(masking.mask_ratio * 2**32)
        # At least one per cell, however few genes it has.
        filled = ragged.starts[:-1][np.diff(ragged.starts) > 0]
        if len(filled):
            least = np.repeat(np.minimum.reduceat(choice, filled), np.diff(np.append(filled, len(choice))))
            chosen |= choice == least
        at = np.flatnonzero(chosen)
        deed = action[at] / 2**32
        random = deed < masking.random_replace_ratio
        masked = deed >= masking.random_replace_ratio + masking.keep_ratio
        again = random_bits((*key, 1), cells[ragged.row[at].astype(np.int64)], ragged.genes[at])
        return _Hidden(at, at[masked], at[random], again[random])

    def _padded(self, ragged: _Ragged, hidden: _Hidden) -> CellBatch:
        strategy, cls = self.options.strategy, int(self.options.prepend_cls)
        count = len(ragged.starts) - 1
        width = int(np.diff(ragged.starts).max(initial=0)) + cls
        place = ragged.row.astype(np.int64) * width + ragged.rank + cls
        genes = np.full(count * width, PAD, np.int32)
        genes[place] = ragged.genes
        genes[place] += FIRST_GENE
        if cls:
            genes[::width] = CLS
        batch: dict[str, NDArray[Any]] = {"genes": genes}
        if strategy == "rank_value":
            targets = np.full(count * width, NOT_HIDDEN, np.int32)
            targets[place[hidden.chosen]] = ragged.genes[hidden.chosen]
            genes[place[hidden.masked]] = MASK
            genes[place[hidden.random]] = FIRST_GENE + hidden.bits % np.uint64(self.genes)
        elif strategy == "binned_expression":
            targets = np.full(count * width, NOT_HIDDEN, np.int32)
            targets[place[hidden.chosen]] = ragged.shown[hidden.chosen]
            bins = batch["bins"] = np.full(count * width, NO_BIN, np.int32)
            bins[place] = ragged.shown + np.uint64(FIRST_BIN)
            bins[place[hidden.masked]] = HIDDEN_BIN
            bins[place[hidden.random]] = FIRST_BIN + hidden.bits % np.uint64(self.options.num_bins)
        else:
            expression = ragged.shown.astype(np.uint32).view(np.float32)
            targets = np.full(count * width, NOT_HIDDEN, np.float32)
            targets[place[hidden.chosen]] = expression[hidden.chosen]
            values = batch["values"] = np.zeros(count * width, np.float32)
            values[place] = expression
            values[place[hidden.random]] = expression[ragged.another_of_the_cell(hidden)]
            values[place[hidden.masked]] = 0.0
            concealed = batch["hidden"] = np.zeros(count * width, np.bool_)
            concealed[place[hidden.masked]] = True
        batch["targets"] = targets
        return {name: torch.from_numpy(array.reshape(count, width)) for name, array in batch.items()}


_ROW, _VALUE = np.uint64(52), np.uint64(20)
_VALUE_BITS, _GENE_BITS = np.uint64(0xFFFFFFFF), np.uint64(0xFFFFF)
MOST_ROWS, MOST_GENES = 1 << 12, 1 << 20
"""What fits beside a value in 64 bits."""


@dataclass(frozen=True)
class _Ragged:
    """The tokens of all cells of a batch, one after the other."""

    starts: Ints
    rank: Ints
    """Place in its cell."""
    genes: NDArray[np.uint64]
    shown: NDArray[np.uint64]
    """The bin or the bits of the expression; while sorted by expression, those bits inverted."""
    row: NDArray[np.uint64]

    def another_of_the_cell(self, hidden: _Hidden) -> Ints:
        row = self.row[hidden.random].astype(np.int64)
        lengths = self.starts[row + 1] - self.starts[row]
        return self.starts[row] + (hidden.bits % lengths.astype(np.uint64)).astype(np.int64)


@dataclass(frozen=True)
class _Hidden:
    """Places in the ragged tokens: all that are to be predicted, and those of them shown as MASK or as something else."""

    chosen: Ints
    masked: Ints
    random: Ints
    bits: NDArray[np.uint64]
    """Random bits for each of `random`."""


def _log_normalized(values: NDArray[np.float32], rows: SparseRows, target: float) -> NDArray[np.float32]:
    before = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
    total = before[rows.starts[1:]] - before[rows.starts[:-1]]
    scale = np.divide(target, total, out=np.zeros_like(total), where=total > 0)
    return np.log1p(values * np.repeat(scale, rows.lengths).astype(np.float32))


def _bins(ragged: _Ragged, bins: int) -> NDArray[np.uint64]:
    """Bins of equal size among the genes of a cell, 0 for the least expressed; equal values share the upper bin."""
    length = np.repeat(np.diff(ragged.starts), np.diff(ragged.starts))
    first_of_equals = np.ones(len(length), bool)
    if len(length):
        first_of_equals[1:] = (ragged.shown[1:] != ragged.shown[:-1]) | (ragged.row[1:] != ragged.row[:-1])
    rank = np.maximum.accumulate(np.where(first_of_equals, np.arange(len(length)), 0))
    above = rank - np.repeat(ragged.starts[:-1], np.diff(ragged.starts))
    return ((length - 1 - above) * bins // length).astype(np.uint64)


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
    """Batches of different width as one."""
    if len(parts) == 1:
        return parts[0]
    width = max(part["genes"].shape[1] for part in parts)
    joined = {}
    for name, first in parts[0].items():
        if first.ndim == 1:
            joined[name] = torch.cat([part[name] for part in parts])
            continue
        filler = NOT_HIDDEN if name == "targets" else 0
        whole = first.new_full((sum(len(part[name]) for part in parts), width), filler)
        row = 0
        for part in parts:
            rows, columns = part[name].shape
            whole[row : row + rows, :columns] = part[name]
            row += rows
        joined[name] = whole
    return joined
