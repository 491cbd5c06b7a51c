"""Tokens and masks: against a tokenizer that takes one cell at a time, and what must hold for every cell."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.tasks.cells.config import CellsTokenizer
from shardwise.tasks.cells.rows import SparseRows, starts_of
from shardwise.tasks.cells.tokens import (
    CLS,
    FIRST_BIN,
    FIRST_GENE,
    HIDDEN_BIN,
    MASK,
    PAD,
    CellBatch,
    CellTokenizer,
    join_batches,
    revealed,
)
from tests.cells_task.files import random_counts

STRATEGIES = ["rank_value", "binned_expression", "continuous_projection"]
GENES = 40


def rows_of(counts: Any) -> SparseRows:
    rows, genes = np.nonzero(counts)
    return SparseRows(
        starts_of(np.bincount(rows, minlength=len(counts))), genes, counts[rows, genes].astype(np.float32)
    )


def tokenizer(
    strategy: str, *, max_genes: int = GENES, target_sum: float | None = None, cls: bool = True, seed: int = 0
) -> CellTokenizer:
    options = CellsTokenizer.model_validate({"strategy": strategy, "prepend_cls": cls, "num_bins": 7})
    return CellTokenizer(options, GENES, max_genes, target_sum, seed)


def encoded(strategy: str, counts: Any, *, epoch: int = 0, cells: Any = None, **options: Any) -> CellBatch:
    numbers = np.arange(len(counts)) if cells is None else np.asarray(cells)
    return tokenizer(strategy, **options).encode(rows_of(counts), numbers, epoch)


@pytest.mark.parametrize("max_genes", [5, GENES])
@pytest.mark.parametrize("cls", [True, False])
def test_genes_are_ranked_by_expression_and_the_least_expressed_are_cut(max_genes: int, cls: bool) -> None:
    counts = random_counts(20, GENES)
    batch = revealed(encoded("rank_value", counts, max_genes=max_genes, cls=cls))
    for row, cell in zip(batch["genes"].tolist(), counts, strict=True):
        present = np.flatnonzero(cell)
        shown = [token - FIRST_GENE for token in row if token >= FIRST_GENE]
        assert row == [CLS] * cls + [FIRST_GENE + gene for gene in shown] + [PAD] * (len(row) - cls - len(shown))
        assert len(set(shown)) == len(shown) == min(max_genes, len(present)) and set(shown) <= set(present.tolist())
        assert [cell[gene] for gene in shown] == sorted(cell[present], reverse=True)[:max_genes]


@pytest.mark.parametrize("target_sum", [None, 1000.0])
def test_expressions_are_scaled_to_the_library_size_and_logged(target_sum: float | None) -> None:
    counts = random_counts(20, GENES)
    batch = revealed(encoded("continuous_projection", counts, target_sum=target_sum))
    for genes, values, cell in zip(batch["genes"].tolist(), batch["values"], counts, strict=True):
        present = np.flatnonzero(cell)
        assert [gene - FIRST_GENE for gene in genes if gene >= FIRST_GENE] == present.tolist()
        expected = np.log1p(cell * target_sum / cell.sum()) if target_sum else cell
        torch.testing.assert_close(values[1 : 1 + len(present)], torch.tensor(expected[present], dtype=torch.float32))
        assert values[0] == 0


def test_bins_hold_equally_many_genes_of_a_cell_and_equal_values_share_one() -> None:
    counts = np.zeros((2, GENES), int)
    counts[0, :14] = np.arange(1, 15)  # all different: two per bin of seven
    counts[1, :10] = 3  # all equal
    bins = revealed(encoded("binned_expression", counts))["bins"]
    assert bins[0, 1:15].tolist() == [FIRST_BIN + i // 2 for i in range(14)]
    assert bins[1, 1:11].unique().tolist() == [FIRST_BIN + 6]


def test_a_cell_without_genes_is_a_row_of_padding() -> None:
    counts = random_counts(3, GENES)
    counts[1] = 0
    for strategy in STRATEGIES:
        batch = encoded(strategy, counts)
        assert batch["genes"][1].tolist() == [CLS] + [PAD] * (batch["genes"].shape[1] - 1)
        assert not (batch["targets"][1] >= 0).any()
        assert (batch["targets"][[0, 2]] >= 0).any(dim=1).all()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_hidden_follows_from_seed_epoch_and_cell_and_not_from_the_batch(strategy: str) -> None:
    counts = random_counts(12, GENES)
    whole = encoded(strategy, counts)
    order = np.random.default_rng(1).permutation(12)
    mixed = encoded(strategy, counts[order], cells=order)
    one_by_one = join_batches([encoded(strategy, counts[[cell]], cells=[cell]) for cell in range(12)])
    for name in whole:
        assert torch.equal(whole[name][torch.from_numpy(order)], mixed[name]), name
        assert torch.equal(whole[name], one_by_one[name]), name
    for other in (encoded(strategy, counts, epoch=1), encoded(strategy, counts, seed=1)):
        assert not torch.equal(whole["targets"], other["targets"])
    assert not torch.equal(whole["targets"], encoded(strategy, counts, cells=np.arange(12) + 100)["targets"])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fifteen_percent_are_hidden_of_which_eighty_masked_ten_random_and_ten_kept(strategy: str) -> None:
    counts = random_counts(6000, GENES, density=0.9)  # of a cell with few genes, one is hidden in any case
    batch, truth = encoded(strategy, counts), revealed(encoded(strategy, counts))
    chosen = batch["targets"] >= 0
    tokens = int((counts > 0).sum())
    assert int(chosen.sum()) / tokens == pytest.approx(0.15, abs=0.01)
    if strategy == "continuous_projection":
        masked, same = batch["hidden"], (batch["values"] == truth["values"]) & ~batch["hidden"]
        coincidence = 0.1 * (1 / 29 + 1 / 36)  # another gene of the cell with the same count, or itself
    else:
        name = "genes" if strategy == "rank_value" else "bins"
        masked = batch[name] == (MASK if strategy == "rank_value" else HIDDEN_BIN)
        same = batch[name] == truth[name]
        coincidence = 0.1 / (GENES if strategy == "rank_value" else 7)
    assert not (masked & ~chosen).any() and same[~chosen].all()
    shares = [float(part[chosen].float().mean()) for part in (masked, same)]
    assert shares[0] == pytest.approx(0.8, abs=0.01)
    assert shares[1] == pytest.approx(0.1 + coincidence, abs=0.01)


def test_no_expression_is_visible_under_a_mask() -> None:
    """Two cells that differ only in what is hidden look the same to the model."""
    counts = random_counts(200, GENES)
    for strategy, shown in (
        ("binned_expression", ["genes", "bins"]),
        ("continuous_projection", ["genes", "values", "hidden"]),
    ):
        batch = encoded(strategy, counts)
        if strategy == "binned_expression":
            masked = batch["bins"] == HIDDEN_BIN
            assert masked.any()
        else:
            masked = batch["hidden"]
            assert masked.any() and (batch["values"][masked] == 0).all()
        assert set(batch) == {*shown, "targets", "places", "cells"}, "nothing else is handed to the model"


def test_a_rank_does_not_tell_a_hidden_expression() -> None:
    """Where expressions are hidden, genes stand in the order of their numbers, not of expression."""
    counts = random_counts(50, GENES)
    for strategy in ("binned_expression", "continuous_projection"):
        for row in encoded(strategy, counts)["genes"].tolist():
            genes = [gene for gene in row if gene >= FIRST_GENE]
            assert genes == sorted(genes)


def test_among_equal_counts_the_neighbours_do_not_tell_a_hidden_gene() -> None:
    """All counts equal: between two neighbours lies any other gene as often as chance has it."""
    counts = np.ones((500, GENES), int)
    genes = revealed(encoded("rank_value", counts))["genes"][:, 1:].numpy()
    left, middle, right = genes[:, :-2], genes[:, 1:-1], genes[:, 2:]
    between = (np.minimum(left, right) < middle) & (middle < np.maximum(left, right))
    assert between.mean() == pytest.approx(1 / 3, abs=0.01)
    assert (np.sort(genes, axis=1) == np.arange(GENES) + FIRST_GENE).all()
    assert len({tuple(row) for row in genes}) == 500, "each cell has an order of its own"
    again = revealed(encoded("rank_value", counts, epoch=3))["genes"][:, 1:].numpy()
    assert (genes == again).all(), "and keeps it"


def test_a_random_replacement_is_never_a_special_token() -> None:
    counts = random_counts(6000, GENES)
    genes = encoded("rank_value", counts)
    replaced = (genes["targets"] >= 0) & (genes["genes"] != MASK)
    assert int(genes["genes"][replaced].min()) == FIRST_GENE
    assert int(genes["genes"][replaced].max()) == FIRST_GENE + GENES - 1
    bins = encoded("binned_expression", counts)
    replaced = (bins["targets"] >= 0) & (bins["bins"] != HIDDEN_BIN)
    assert sorted(bins["bins"][replaced].unique().tolist()) == [FIRST_BIN + number for number in range(7)]


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.sampled_from(STRATEGIES))
def test_pieces_joined_are_the_batch_in_one(sizes: list[int], strategy: str) -> None:
    counts = random_counts(sum(sizes), GENES, seed=sum(sizes))
    cells = np.arange(sum(sizes))
    edges = np.cumsum([0, *sizes])
    pieces = [encoded(strategy, counts[a:b], cells=cells[a:b]) for a, b in itertools.pairwise(edges)]
    whole, joined = encoded(strategy, counts), join_batches(pieces)
    assert whole.keys() == joined.keys()
    assert all(torch.equal(whole[name], joined[name]) for name in whole)
