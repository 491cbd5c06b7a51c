"""Cells on a real GPU: packed, padded and without a mask they compute the same, compiled or not, and nobody waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

from shardwise.kernels import attention
from shardwise.kernels.backend import BACKENDS, remembered_backend
from shardwise.tasks.cells import CellsTask
from shardwise.tasks.packing import measured_attention
from tests.cells_task.test_packing import FULL, LAYOUTS, PACKED, PADDED, RAGGED, batch_of, task_of
from tests.cells_task.test_tokens import STRATEGIES
from tests.distributed import work
from tests.distributed.pool import RankPool
from tests.gpu.test_packing import calls  # noqa: F401

pytestmark = pytest.mark.gpu

WIDE = ["model.hidden_dim=64", "training.device=cuda"]


def on_gpu(task: CellsTask, cells: int = 8) -> dict[str, Any]:
    moved: dict[str, Any] = tree_map_only(torch.Tensor, lambda tensor: tensor.cuda(), batch_of(task, cells))
    return moved


def loss_and_gradient(task: CellsTask, model: Any, batch: Any, *, half: bool = True) -> tuple[float, torch.Tensor]:
    model.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=half):
        loss = task.loss(model, batch).sum
    loss.backward()
    grads = [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    return float(loss.detach()), torch.cat(grads)


def assert_close(found: tuple[float, torch.Tensor], expected: tuple[float, torch.Tensor]) -> None:
    assert found[0] == pytest.approx(expected[0], rel=5e-3)
    assert float((found[1] - expected[1]).norm() / expected[1].norm()) < 3e-2


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_in_bf16_the_kernel_for_ragged_sequences_computes_what_padded_rows_do(
    strategy: str,
    calls: list[int],  # noqa: F811
) -> None:
    task, padding = (task_of(packing, *WIDE, f"tokenizer.strategy={strategy}") for packing in (PACKED, PADDED))
    model = task.build_model().cuda().train()
    expected = loss_and_gradient(padding, model, on_gpu(padding))
    assert not calls
    assert_close(loss_and_gradient(task, model, on_gpu(task)), expected)
    assert len(calls) == 2


@pytest.mark.parametrize("name", BACKENDS)
def test_cells_of_one_length_are_the_same_whichever_attention_is_preferred(name: str) -> None:
    task = task_of(FULL, *WIDE)
    model, batch = task.build_model().cuda().train(), on_gpu(task)
    masked = {key: value for key, value in batch.items() if key != "full"}
    expected = loss_and_gradient(task, model, masked)
    attention.prefer_backend(model, name)
    assert_close(loss_and_gradient(task, model, batch), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_compiled_blocks_take_every_layout(layout: str) -> None:
    task = task_of(*LAYOUTS[layout], *WIDE)
    model: Any = task.build_model().cuda().train()
    batches = [on_gpu(task, cells) for cells in (8, 11, 5, 9)]
    plain = [loss_and_gradient(task, model, batch) for batch in batches]
    torch._dynamo.reset()
    model.head[-1].compiled = True
    for block in model.blocks:
        block.forward = torch.compile(block.forward, fullgraph=True)
    for batch, expected in zip(batches, plain, strict=True):
        assert_close(loss_and_gradient(task, model, batch), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_training_pass_waits_for_nothing(strategy: str, layout: str) -> None:
    task = task_of(*LAYOUTS[layout], *WIDE, f"tokenizer.strategy={strategy}")
    model, batch = task.build_model().cuda().train(), on_gpu(task)
    loss_and_gradient(task, model, batch)  # what is done once only may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = task.loss(model, batch).sum
        loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_a_run_packs_by_default_has_the_padded_curve_and_resumes_bit_for_bit(
    ranks: RankPool, tmp_path: Path, strategy: str
) -> None:
    options = [*WIDE, f"training.strategy={strategy}", "training.precision=bf16-mixed", *work.folder_of(tmp_path)]
    assert ranks.run(1, work.with_session, RAGGED, options, _packs)[0]
    pads = ranks.run(1, work.train, RAGGED, [*options, PADDED])[0]
    whole = work.resumed_bit_for_bit(ranks, 1, RAGGED, options, steps=5)
    assert whole["ids"] == pads["ids"]
    assert whole["losses"] == pytest.approx(pads["losses"], rel=2e-2)


def _packs(session: Any) -> bool:
    batch = next(iter(session.batches()))
    return bool(session.task.packs) and "starts" in batch.micro[0].inputs


def test_a_run_measures_before_it_begins_and_prefers_what_it_found(ranks: RankPool) -> None:
    options = [*WIDE, FULL, "training.precision=bf16-mixed"]
    remembered, preferred = ranks.run(1, work.with_session, RAGGED, options, _preferred)[0]
    assert remembered in BACKENDS
    assert preferred == {remembered}


def _preferred(session: Any) -> tuple[Any, set[Any]]:
    blocks = session.parts.spread.module.blocks
    shape = session.task._attention_shape(6)
    return remembered_backend(shape, measured_attention()), {block.attention_backend for block in blocks}
