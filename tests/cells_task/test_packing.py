"""Cells laid end to end, or without a mask: the same loss, the same gradients, the same run; and nobody waits for a device."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.engine.session import Session
from shardwise.errors import ConfigError
from shardwise.tasks.cells.layout import laid_out, padding_share
from shardwise.tasks.cells.task import CellsTask
from shardwise.tasks.cells.tokens import CLS, FIRST_GENE, NO_PLACE, NOT_HIDDEN, PAD, CellBatch, join_batches
from tests.cells_task.files import random_counts, write_cells
from tests.cells_task.test_tokens import STRATEGIES, encoded
from tests.distributed import work
from tests.distributed.pool import RankPool
from tests.distributed.test_parity import assert_same_curve
from tests.packing import BY_DEFAULT, REFUSED
from tests.tasks import config_of

RAGGED = """
task: cells
data: {num_cells: 120, num_genes: 60, num_types: 3, valid_fraction: 0.2}
model: {hidden_dim: 16, num_layers: 2, num_heads: 2}
training: {device: cpu, batch_size: 3, gradient_accumulation: 2, max_steps: 12, max_epochs: 9, gradient_clip: 1.0,
           optimizer: {name: adamw, lr: 0.003}}
"""
PACKED, PADDED = "tokenizer.packing=true", "tokenizer.packing=false"
FULL = "data.max_genes=5"
"""Every cell has more: none is padded."""
LAYOUTS = {"packed": [PACKED], "padded": [PADDED], "full": [FULL]}


def task_of(*overrides: str) -> CellsTask:
    return CellsTask(config_of(RAGGED, list(overrides)))


def batch_of(task: CellsTask, cells: int = 8) -> dict[str, Any]:
    """As the loop gets it."""
    data: Any = task.train_data()
    return data.finish(data.read(np.arange(cells), 0))


def loss_and_gradients(task: CellsTask, model: nn.Module, batch: Any) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = task.loss(model, batch)
    assert int(loss.count) == task.count(batch) > 0
    loss.sum.backward()
    return float(loss.sum.detach()), {
        name: each.grad for name, each in model.named_parameters() if each.grad is not None
    }


def assert_same_gradients(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, theirs in wanted.items():
        torch.testing.assert_close(
            got[name], theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()), msg=partial("{}: {}".format, name)
        )


@pytest.mark.parametrize("cls", ["true", "false"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_packed_cells_have_the_loss_and_the_gradients_of_padded_ones(strategy: str, cls: str) -> None:
    overrides = [f"tokenizer.strategy={strategy}", f"tokenizer.prepend_cls={cls}"]
    task = task_of(PACKED, *overrides)
    model = task.build_model().train()
    packed, padded = batch_of(task), batch_of(task_of(PADDED, *overrides))
    assert len(packed["genes"]) == 1 and len(padded["genes"]) == 8 and bool((padded["genes"] == PAD).any())
    expected, wanted = loss_and_gradients(task, model, padded)
    found, got = loss_and_gradients(task, model, packed)
    assert found == pytest.approx(expected, rel=1e-6)
    assert_same_gradients(got, wanted)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_cells_of_one_length_need_neither_mask_nor_packing(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    task = task_of(PACKED, FULL, f"tokenizer.strategy={strategy}")
    batch, model = batch_of(task), task.build_model().train()
    assert batch["full"] is True and batch["genes"].shape == (8, 6) and not batch.keys() & {"starts", "longest"}
    expected, wanted = loss_and_gradients(task, model, {name: each for name, each in batch.items() if name != "full"})
    masks: list[Any] = []
    attend = nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        nn.functional,
        "scaled_dot_product_attention",
        lambda *args, **options: masks.append(options["attn_mask"]) or attend(*args, **options),
    )
    found, got = loss_and_gradients(task, model, batch)
    assert masks == [None, None]
    assert found == pytest.approx(expected, rel=1e-6)
    assert_same_gradients(got, wanted)


class _NoWaiting(TorchDispatchMode):
    """On CUDA the host would wait for the device: what these give has a size, or a value, that only the device knows."""

    waits = {"aten::nonzero", "aten::masked_select", "aten::_local_scalar_dense", "aten::equal", "aten::unique_dim"}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name
        assert name not in self.waits, name
        if name in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
            assert not any(index is not None and index.dtype == torch.bool for index in args[1]), f"{name} by a mask"
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_training_pass_waits_for_nothing(strategy: str, layout: str) -> None:
    task = task_of(f"tokenizer.strategy={strategy}", *LAYOUTS[layout])
    batch, model = batch_of(task), task.build_model().train()
    with _NoWaiting():
        task.loss(model, batch).sum.backward()


@pytest.mark.parametrize("way", [lambda t: t[t > 0], lambda t: t.nonzero(), lambda t: float(t.sum())])
def test_what_would_wait_is_noticed(way: Any) -> None:
    with _NoWaiting(), pytest.raises(AssertionError):
        way(torch.ones(3))


@pytest.mark.slow
def test_a_compiled_block_is_one_graph_for_every_layout() -> None:
    model: Any = task_of(PACKED).build_model().train()
    batches = [batch_of(task_of(*overrides), cells) for overrides in LAYOUTS.values() for cells in (4, 7, 6)]
    plain = [loss_and_gradients(task_of(), model, batch) for batch in batches]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for block in model.blocks:
        block.attention_backend = "flash"
        block.forward = torch.compile(block.forward, backend="aot_eager", fullgraph=True)
    for batch, (expected, wanted) in zip(batches, plain, strict=True):
        found, got = loss_and_gradients(task_of(), model, batch)
        assert found == pytest.approx(expected, rel=1e-6)
        assert_same_gradients(got, wanted)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 6, "at most two of each: one size, and any size"


def test_the_summed_loss_is_that_of_the_predictions() -> None:
    for strategy in STRATEGIES:
        task = task_of(PADDED, f"tokenizer.strategy={strategy}")
        model, batch = task.build_model().eval(), batch_of(task)
        with torch.no_grad():
            evaluated: Any = task.evaluate(model, batch)["loss"]
            torch.testing.assert_close(task.loss(model, batch).sum, evaluated.sum)


def test_a_change_in_one_cell_changes_no_other_cells_predictions() -> None:
    task = task_of(PACKED)
    batch, model = batch_of(task), task.build_model().eval()
    first, last = batch["starts"][2:4].tolist()
    with torch.no_grad():
        before = model(batch)[0]
        batch["genes"][0, first + 1 : last] = FIRST_GENE
        after = model(batch)[0]
    places = batch["places"][0]
    inside = (places >= first) & (places < last)
    assert torch.equal(before[~inside], after[~inside]) and not torch.equal(before[inside], after[inside])


# ---------------------------------------------------------------- how it lies in memory


def test_a_packed_row_says_where_cells_begin_and_what_is_hidden() -> None:
    genes = torch.tensor([[CLS, 7, 8, 9], [CLS, 5, PAD, PAD]])
    targets = torch.tensor([[NOT_HIDDEN, 4, NOT_HIDDEN, 6], [NOT_HIDDEN, 2, NOT_HIDDEN, NOT_HIDDEN]])
    places = torch.tensor([[1, 3, NO_PLACE], [1, NO_PLACE, NO_PLACE]])
    row = laid_out(
        {"genes": genes, "targets": targets, "places": places, "cells": torch.arange(2)}, packs=True, max_tokens=16
    )
    assert row["genes"].tolist() == [[CLS, 7, 8, 9, CLS, 5, PAD, PAD]]
    assert row["targets"].tolist() == [[-1, 4, -1, 6, -1, 2, -1, -1]]
    assert row["positions"].tolist() == [[0, 1, 2, 3, 0, 1, 0, 0]]
    assert row["places"].tolist() == [[1, 3, 5, *[NO_PLACE] * 5]]
    assert row["starts"].tolist() == [0, 4, 6, 8] and row["starts"].dtype == torch.int32
    assert row["longest"] == 4 and row["cells"].tolist() == [0, 1]


@pytest.mark.parametrize("cls", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_places_are_where_something_is_hidden_however_a_batch_came_about(strategy: str, cls: bool) -> None:
    counts = random_counts(9, 40)
    whole = encoded(strategy, counts, cls=cls)
    one_by_one = join_batches([encoded(strategy, counts[[cell]], cells=[cell], cls=cls) for cell in range(9)])
    for batch in (whole, one_by_one):
        hidden = [torch.nonzero(row >= 0).flatten().tolist() for row in batch["targets"]]
        assert [[place for place in row if place != NO_PLACE] for row in batch["places"].tolist()] == hidden
        assert batch["places"].shape[1] % 8 == 0
        packed = laid_out(batch, packs=True, max_tokens=41)
        there = packed["places"][packed["places"] != NO_PLACE]
        assert there.tolist() == torch.nonzero(packed["targets"][0] >= 0).flatten().tolist()


def test_packing_leaves_less_than_two_percent_of_padding() -> None:
    rates = np.linspace(0.05, 3, 32)[:, None]
    batch = encoded("rank_value", np.random.default_rng(0).poisson(rates, (32, 40)))
    assert padding_share(laid_out(batch, packs=False, max_tokens=41)) > 0.2
    assert padding_share(laid_out(batch, packs=True, max_tokens=41)) < 0.02


def _empty(cells: int) -> np.ndarray[Any, Any]:
    counts = random_counts(6, 40)
    counts[:cells] = 0
    return counts


@pytest.mark.parametrize("empty", [1, 6])
@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_cells_without_a_token_leave_no_trace(strategy: str, packs: bool, empty: int) -> None:
    task = task_of(f"tokenizer.strategy={strategy}", "tokenizer.prepend_cls=false", "tokenizer.num_bins=7")
    model = task.build_model().train()

    def gradients(batch: CellBatch) -> tuple[int, dict[str, torch.Tensor]]:
        model.zero_grad()
        loss = task.loss(model, laid_out(batch, packs=packs, max_tokens=41))
        loss.sum.backward()
        return int(loss.count), {name: each.grad for name, each in model.named_parameters() if each.grad is not None}

    count, got = gradients(encoded(strategy, _empty(empty), cls=False))
    if empty == 6:
        assert count == 0 and not any(each.any() for each in got.values())
        return
    cells = np.arange(empty, 6)
    expected, wanted = gradients(encoded(strategy, _empty(empty)[empty:], cells=cells, cls=False))
    assert count == expected
    assert_same_gradients(got, wanted)


# ---------------------------------------------------------------- whole runs


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["tokenizer.strategy=binned_expression", "data.num_workers=1"],
        ["tokenizer.strategy=continuous_projection", "data.streaming=true", "data.num_workers=2"],
    ],
    ids=["in memory", "with a worker", "streamed"],
)
def test_a_packed_run_has_the_curve_of_the_padded_one(ranks: RankPool, overrides: list[str]) -> None:
    assert ranks.run(1, work.with_session, RAGGED, [PACKED, *overrides], _rows)[0] == {1}
    packs = ranks.run(1, work.train, RAGGED, [PACKED, *overrides])[0]
    pads = ranks.run(1, work.train, RAGGED, [PADDED, *overrides])[0]
    assert len(packs["losses"]) == 12
    assert packs["ids"] == pads["ids"]
    assert_same_curve(packs, pads)


def _rows(session: Any) -> set[int]:
    """Of the first micro-batches."""
    return {len(micro.inputs["genes"]) for micro in next(iter(session.batches())).micro}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tensor"])
def test_two_ranks_pack_too(ranks: RankPool, strategy: str) -> None:
    few = ["training.max_steps=4"]
    pads = ranks.run(1, work.train, RAGGED, [PADDED, *few, "training.batch_size=6"])[0]
    spread = [f"training.strategy={strategy}", f"training.batch_size={6 if strategy == 'tensor' else 3}"]
    packs = ranks.run(2, work.train, RAGGED, [PACKED, *few, *spread])[0]
    assert_same_curve(packs, pads)


def test_a_packed_run_resumed_in_the_middle_is_bit_for_bit_the_uninterrupted_one(
    ranks: RankPool, tmp_path: Path
) -> None:
    overrides = [PACKED, "model.dropout=0.1", *work.folder_of(tmp_path)]
    work.resumed_bit_for_bit(ranks, 1, RAGGED, overrides, steps=5)


def test_a_packed_run_of_cells_without_genes_goes_on(ranks: RankPool, tmp_path: Path) -> None:
    counts = random_counts(60, 20)
    counts[30:] = 0
    path = write_cells(tmp_path / "a.h5ad", counts)
    overrides = [f"data={{source: local, paths: [{path}]}}", "tokenizer.prepend_cls=false", PACKED]
    result = ranks.run(1, work.run_fit, RAGGED, [*overrides, "training.max_epochs=1"], str(tmp_path))[0]
    assert result["steps"] > 5 and "nan" not in result["output"]


def test_evaluation_does_not_pack() -> None:
    task = task_of(PACKED)
    data: Any = task.valid_data()
    batch = data.finish(data.read(np.arange(6), 0))
    assert len(batch["genes"]) == 6 and "starts" not in batch
    cells: Any = task.evaluate(task.build_model(), batch)["cells"]
    assert cells.columns["embedding"].shape == (6, 16)


@pytest.mark.parametrize(("overrides", "message"), REFUSED)
def test_packing_that_cannot_be_is_refused_with_a_reason(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=f"tokenizer.packing: true, but .*{message}"):
        task_of(PACKED, *overrides).train_data()


@pytest.mark.parametrize(("overrides", "on_cuda", "packs"), BY_DEFAULT)
def test_by_default_cells_are_packed_on_cuda_where_that_can_be(
    monkeypatch: pytest.MonkeyPatch, overrides: list[str], on_cuda: bool, packs: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_cuda)
    assert task_of("training.device=auto", *overrides).packs is packs


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_size_of_a_batch_is_found_with_batches_that_lie_as_those_of_training_do(
    layout: str, monkeypatch: pytest.MonkeyPatch, in_tmp: Path
) -> None:
    tried: list[set[str]] = []
    loss = CellsTask.loss

    def noted(self: CellsTask, model: nn.Module, batch: Any) -> Any:
        tried.append(set(batch))
        return loss(self, model, batch)

    monkeypatch.setattr(CellsTask, "loss", noted)
    config = config_of(RAGGED, [*LAYOUTS[layout], "training.batch_size=auto", "training.gradient_accumulation=1"])
    with Session(config) as session:
        session.prepare()
        trained = set(next(iter(session.batches())).micro[0].inputs)
    assert tried and all(each == trained for each in tried)
