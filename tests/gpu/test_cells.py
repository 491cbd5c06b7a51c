"""Cells on a real GPU: packed, padded and without a mask they compute the same, compiled or not, and nobody waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.kernels import attention
from shardwise.kernels.backend import BACKENDS, remembered_backend
from shardwise.tasks.cells.task import CellsTask
from shardwise.tasks.packing import measured_attention
from tests.cells_task.test_packing import FULL, LAYOUTS, PACKED, PADDED, RAGGED, batch_of, task_of
from tests.cells_task.test_tokens import STRATEGIES
from tests.distributed.pool import RankPool
from tests.gpu.packed import (
    WIDE,
    assert_close,
    assert_packs_by_default,
    assert_prefers_what_it_measured,
    assert_same_compiled,
    calls,  # noqa: F401
    loss_and_gradient,
    moved,
)

pytestmark = pytest.mark.gpu


def on_gpu(task: CellsTask, cells: int = 8) -> dict[str, Any]:
    return moved(batch_of(task, cells))


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
    assert_same_compiled(task, model, model.blocks, batches, model.head[-1])


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
    assert_packs_by_default(ranks, RAGGED, PADDED, strategy, tmp_path, resumed_after=5)


def test_a_run_measures_before_it_begins_and_prefers_what_it_found(ranks: RankPool) -> None:
    assert_prefers_what_it_measured(ranks, RAGGED, FULL, _preferred)


def _preferred(session: Any) -> tuple[Any, set[Any]]:
    blocks = session.parts.strategy.module.blocks
    shape = session.task._attention_shape(6)
    return remembered_backend(shape, measured_attention()), {block.attention_backend for block in blocks}
