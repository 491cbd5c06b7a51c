"""Packed games on a real GPU: PyTorch's kernel for ragged sequences computes what padded rows do; the fastest attention."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.kernels import attention, backend
from shardwise.kernels.backend import BACKENDS, Shape, fastest_backend, remembered_backend
from shardwise.tasks.chess.task import ChessTask
from shardwise.tasks.packing import measured_attention
from tests.chess_task.test_packing import MODELS, PACKED, PADDED, _losses, ragged, task_of  # noqa: F401
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

Tasks = Callable[..., ChessTask]


def on_gpu(task: ChessTask, games: int = 8) -> dict[str, Any]:
    data = task.train_data()
    return moved(task.collate([data[index] for index in range(games)]))


@pytest.mark.parametrize("overrides", MODELS.values(), ids=MODELS.keys())
def test_in_bf16_ragged_kernels_compute_what_padded_rows_do(
    task_of: Tasks,  # noqa: F811
    calls: list[int],  # noqa: F811
    overrides: list[str],
) -> None:
    packing, padding = task_of(PACKED, *overrides, *WIDE), task_of(PADDED, *overrides, *WIDE)
    model = packing.build_model().cuda().train()
    expected = loss_and_gradient(padding, model, on_gpu(padding))
    assert not calls
    assert_close(loss_and_gradient(packing, model, on_gpu(packing)), expected)
    assert len(calls) == 2  # one per layer


@pytest.mark.parametrize("overrides", MODELS.values(), ids=MODELS.keys())
def test_in_fp32_packed_games_have_the_loss_and_gradients_of_padded_ones(
    task_of: Tasks,  # noqa: F811
    calls: list[int],  # noqa: F811
    overrides: list[str],
) -> None:
    packing, padding = task_of(PACKED, *overrides, *WIDE), task_of(PADDED, *overrides, *WIDE)
    model = packing.build_model().cuda().train()
    expected = loss_and_gradient(padding, model, on_gpu(padding), half=False)
    found = loss_and_gradient(packing, model, on_gpu(packing), half=False)
    assert not calls
    assert_close(found, expected, loss=1e-5, grad=1e-4)


def test_a_change_in_one_game_changes_no_other_games_loss(task_of: Tasks, calls: list[int]) -> None:  # noqa: F811
    task = task_of(PACKED, *WIDE)
    model = task.build_model().cuda().bfloat16().eval()
    batch = on_gpu(task, 4)
    first, last = batch["starts"][1:3].tolist()
    before = _losses(task, model, batch)
    batch["ids"][0, first : last - 1] = 7
    after = _losses(task, model, batch)
    assert calls
    assert torch.equal(before[:first], after[:first]) and torch.equal(before[last:], after[last:])
    assert not torch.equal(before[first:last], after[first:last])


def test_compiled_blocks_take_packed_games_of_any_length(task_of: Tasks) -> None:  # noqa: F811
    task = task_of(PACKED, *WIDE)
    model: Any = task.build_model().cuda().train()
    batches = [on_gpu(task, games) for games in (8, 11, 5, 9)]
    assert_same_compiled(task, model, model.model.layers, batches)


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_a_run_packs_by_default_has_the_padded_curve_and_resumes_bit_for_bit(
    ranks: RankPool,
    ragged: str,  # noqa: F811
    tmp_path: Path,
    strategy: str,
) -> None:
    assert_packs_by_default(ranks, ragged, PADDED, strategy, tmp_path, resumed_after=7)


@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_fastest_attention_is_measured_and_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kv_heads: int, dtype: torch.dtype
) -> None:
    file, shape = tmp_path / "attention.json", Shape(4, 8, kv_heads, 512, 64, dtype)
    fastest = fastest_backend(shape, file)
    assert fastest in BACKENDS
    assert dtype != torch.float32 or fastest == "efficient"  # the others are for half precision
    print(f"{shape}: { ({name: backend._measure(shape, name) for name in BACKENDS}) } ms, {fastest}")
    monkeypatch.setattr(backend, "_measure", None)  # not asked again
    assert fastest_backend(shape, file) == remembered_backend(shape, file) == fastest


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("overrides", MODELS.values(), ids=MODELS.keys())
def test_rows_are_the_same_whichever_attention_is_preferred(
    task_of: Tasks,  # noqa: F811
    name: str,
    overrides: list[str],
) -> None:
    task = task_of(PADDED, *overrides, *WIDE)
    model = task.build_model().cuda().train()
    batch = on_gpu(task)
    attention.prefer_backend(model, None)
    expected = loss_and_gradient(task, model, batch)
    attention.prefer_backend(model, name)
    assert_close(loss_and_gradient(task, model, batch), expected)


def test_a_padded_run_measures_before_it_begins_and_prefers_what_it_found(ranks: RankPool, ragged: str) -> None:  # noqa: F811
    assert_prefers_what_it_measured(ranks, ragged, PADDED, _preferred)


def _preferred(session: Any) -> tuple[Any, set[Any]]:
    modules = session.parts.strategy.module.modules()
    shape = session.task._attention_shape(session.parts.strategy.module)
    preferred = {module.attention_backend for module in modules if hasattr(module, "is_causal")}
    return remembered_backend(shape, measured_attention()), preferred
