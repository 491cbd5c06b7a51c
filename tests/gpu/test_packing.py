"""Packed games on a real GPU: PyTorch's kernel for ragged sequences computes what padded rows do; the fastest attention."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from shardwise.kernels import attention, backend
from shardwise.kernels.backend import BACKENDS, Shape, fastest_backend, remembered_backend
from shardwise.tasks.chess import ChessTask
from tests.chess_task.test_packing import MODELS, PACKED, PADDED, _losses, ragged, task_of  # noqa: F401
from tests.distributed import work
from tests.distributed.pool import RankPool

pytestmark = pytest.mark.gpu

WIDE = ["model.hidden_dim=64", "training.device=cuda"]
Tasks = Callable[..., ChessTask]


def on_gpu(task: ChessTask, games: int = 8) -> dict[str, Any]:
    data = task.train_data()
    batch = task.collate([data[index] for index in range(games)])
    moved: dict[str, Any] = tree_map_only(torch.Tensor, lambda tensor: tensor.cuda(), batch)
    return moved


def loss_and_gradient(
    task: ChessTask, model: nn.Module, batch: dict[str, Any], *, half: bool
) -> tuple[float, torch.Tensor]:
    model.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=half):
        loss = task.loss(model, batch).sum
    loss.backward()
    grads = [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    return float(loss.detach()), torch.cat(grads)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often PyTorch's kernel for ragged sequences was called."""
    made: list[int] = []
    kernel = attention._VARLEN
    assert kernel is not None, "this PyTorch has no torch.nn.attention.varlen"

    def counted(*args: Any) -> torch.Tensor:
        made.append(1)
        return kernel(*args)

    monkeypatch.setattr(attention, "_VARLEN", counted)
    return made


@pytest.mark.parametrize("overrides", MODELS.values(), ids=MODELS.keys())
def test_in_bf16_ragged_kernels_compute_what_padded_rows_do(
    task_of: Tasks,  # noqa: F811
    calls: list[int],
    overrides: list[str],
) -> None:
    packing, padding = task_of(PACKED, *overrides, *WIDE), task_of(PADDED, *overrides, *WIDE)
    model = packing.build_model().cuda().train()
    expected, wanted = loss_and_gradient(padding, model, on_gpu(padding), half=True)
    assert not calls
    found, got = loss_and_gradient(packing, model, on_gpu(packing), half=True)
    assert len(calls) == 2  # one per layer
    assert found == pytest.approx(expected, rel=5e-3)
    assert float((got - wanted).norm() / wanted.norm()) < 3e-2


@pytest.mark.parametrize("overrides", MODELS.values(), ids=MODELS.keys())
def test_in_fp32_packed_games_have_the_loss_and_gradients_of_padded_ones(
    task_of: Tasks,  # noqa: F811
    calls: list[int],
    overrides: list[str],
) -> None:
    packing, padding = task_of(PACKED, *overrides, *WIDE), task_of(PADDED, *overrides, *WIDE)
    model = packing.build_model().cuda().train()
    expected, wanted = loss_and_gradient(padding, model, on_gpu(padding), half=False)
    found, got = loss_and_gradient(packing, model, on_gpu(packing), half=False)
    assert not calls
    assert found == pytest.approx(expected, rel=1e-5)
    assert float((got - wanted).norm() / wanted.norm()) < 1e-4


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
    plain = [loss_and_gradient(task, model, batch, half=True) for batch in batches]
    torch._dynamo.reset()
    for layer in model.model.layers:
        layer.forward = torch.compile(layer.forward, fullgraph=True)
    for batch, (expected, wanted) in zip(batches, plain, strict=True):
        found, got = loss_and_gradient(task, model, batch, half=True)
        assert found == pytest.approx(expected, rel=5e-3)
        assert float((got - wanted).norm() / wanted.norm()) < 3e-2


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_a_run_packs_by_default_has_the_padded_curve_and_resumes_bit_for_bit(
    ranks: RankPool,
    ragged: str,  # noqa: F811
    tmp_path: Path,
    strategy: str,
) -> None:
    options = [*WIDE, f"training.strategy={strategy}", "training.precision=bf16-mixed", *work.folder_of(tmp_path)]
    assert ranks.run(1, work.with_session, ragged, options, _packs)[0]
    pads = ranks.run(1, work.train, ragged, [*options, PADDED])[0]
    whole = work.resumed_bit_for_bit(ranks, 1, ragged, options, steps=7)
    assert whole["ids"] == pads["ids"]
    assert whole["losses"] == pytest.approx(pads["losses"], rel=2e-2)


def _packs(session: Any) -> bool:
    batch = next(iter(session.batches()))
    return bool(session.task.packs) and "starts" in batch.micro[0].inputs


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
    expected, wanted = loss_and_gradient(task, model, batch, half=True)
    attention.prefer_backend(model, name)
    found, got = loss_and_gradient(task, model, batch, half=True)
    assert found == pytest.approx(expected, rel=5e-3)
    assert float((got - wanted).norm() / wanted.norm()) < 3e-2


def test_a_padded_run_measures_before_it_begins_and_prefers_what_it_found(ranks: RankPool, ragged: str) -> None:  # noqa: F811
    options = [*WIDE, PADDED, "training.precision=bf16-mixed"]
    remembered, preferred = ranks.run(1, work.with_session, ragged, options, _preferred)[0]
    assert remembered in BACKENDS
    assert preferred == {remembered}


def _preferred(session: Any) -> tuple[Any, set[Any]]:
    from shardwise.tasks.packing import measured_attention

    modules = session.parts.spread.module.modules()
    shape = session.task._attention_shape(session.parts.spread.module)
    preferred = {module.attention_backend for module in modules if hasattr(module, "is_causal")}
    return remembered_backend(shape, measured_attention()), preferred
