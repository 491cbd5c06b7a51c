"""What tests of packed samples on a GPU have in common, whichever task packs them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from shardwise.kernels import attention
from shardwise.kernels.backend import BACKENDS
from shardwise.tasks import Task
from tests.distributed import work
from tests.distributed.pool import RankPool

WIDE = ["model.hidden_dim=64", "training.device=cuda"]


def moved(batch: dict[str, Any]) -> dict[str, Any]:
    there: dict[str, Any] = tree_map_only(torch.Tensor, lambda tensor: tensor.cuda(), batch)
    return there


def loss_and_gradient(task: Task, model: nn.Module, batch: Any, *, half: bool = True) -> tuple[float, torch.Tensor]:
    model.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=half):
        loss = task.loss(model, batch).sum
    loss.backward()
    grads = [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    return float(loss.detach()), torch.cat(grads)


def assert_close(
    found: tuple[float, torch.Tensor], expected: tuple[float, torch.Tensor], *, loss: float = 5e-3, grad: float = 3e-2
) -> None:
    """By default to the digits that bf16 has."""
    assert found[0] == pytest.approx(expected[0], rel=loss)
    assert float((found[1] - expected[1]).norm() / expected[1].norm()) < grad


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


def assert_same_compiled(
    task: Task, model: nn.Module, blocks: Iterable[Any], batches: list[Any], head: Any = None
) -> None:
    """Blocks compute the same when they are compiled, one graph each; and the head's loss, where one is given."""
    plain = [loss_and_gradient(task, model, batch) for batch in batches]
    torch._dynamo.reset()
    if head is not None:
        head.compiled = True
    for block in blocks:
        block.forward = torch.compile(block.forward, fullgraph=True)
    for batch, expected in zip(batches, plain, strict=True):
        assert_close(loss_and_gradient(task, model, batch), expected)


def assert_packs_by_default(
    ranks: RankPool, text: str, padded: str, strategy: str, folder: Path, *, resumed_after: int
) -> None:
    """A run that says nothing of packing packs, has the curve of the one with `padded`, and resumes bit for bit."""
    options = [*WIDE, f"training.strategy={strategy}", "training.precision=bf16-mixed", *work.folder_of(folder)]
    assert ranks.run(1, work.with_session, text, options, _packs)[0]
    pads = ranks.run(1, work.train, text, [*options, padded])[0]
    whole = work.resumed_bit_for_bit(ranks, 1, text, options, steps=resumed_after)
    assert whole["ids"] == pads["ids"]
    assert whole["losses"] == pytest.approx(pads["losses"], rel=2e-2)


def _packs(session: Any) -> bool:
    batch = next(iter(session.batches()))
    return bool(session.task.packs) and "starts" in batch.micro[0].inputs


def assert_prefers_what_it_measured(ranks: RankPool, text: str, rows: str, look: Any) -> None:
    """`rows`: what makes it attend to rows. `look`: from a session to the attention remembered and those preferred."""
    remembered, preferred = ranks.run(1, work.with_session, text, [*WIDE, rows, "training.precision=bf16-mixed"], look)[
        0
    ]
    assert remembered in BACKENDS
    assert preferred == {remembered}
