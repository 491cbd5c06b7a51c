"""The check of the loss on a GPU: nothing is compiled for it, and it changes no bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwise import Session
from shardwise.compat.compiler import compiled_frames
from shardwise.engine import loss_check
from shardwise.engine.loss_check import Finding
from shardwise.tasks.chess.task import ChessTask
from tests.tasks import config_of

pytestmark = pytest.mark.gpu

CONFIG = """
task: tests.gpu.test_loss_check:{task}
data: {{source: synthetic, num_games: 200, max_plies: 20}}
model: {{architecture: llama, hidden_dim: 64, num_layers: 2, num_heads: 4}}
training: {{strategy: single, device: cuda, batch_size: 16, max_steps: 5, compile: true, precision: {precision}}}
"""


class Asked(ChessTask):
    pass


class NotAsked(ChessTask):
    loss_is_a_sum = False


class WhollyCompiled(ChessTask):
    """By its author, as one."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.compile()
        return model


def train(folder: Path, task: str, precision: str) -> tuple[list[torch.Tensor], list[float], int]:
    before = compiled_frames()
    with Session(config_of(CONFIG.format(task=task, precision=precision), [f"run_dir={folder}"])) as session:
        model = session.prepare()
        losses = [session.loss(session.step(batch)) for batch in session.batches()]
        return [each.detach().cpu().clone() for each in model.parameters()], losses, compiled_frames() - before


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_compiled_run_is_bit_for_bit_what_it_is_without_the_check(in_tmp: Path, precision: str) -> None:
    weights, losses, _ = train(in_tmp, "Asked", precision)
    without, losses_without, _ = train(in_tmp, "NotAsked", precision)
    assert losses == losses_without
    assert all(torch.equal(one, other) for one, other in zip(weights, without, strict=True))


@pytest.mark.parametrize("task", ["Asked", "WhollyCompiled"])
def test_nothing_is_compiled_for_the_check(in_tmp: Path, monkeypatch: pytest.MonkeyPatch, task: str) -> None:
    found: list[tuple[Finding, int]] = []
    examine = loss_check.examine_loss

    def watched(*args: Any) -> Finding:
        before = compiled_frames()
        finding = examine(*args)
        found.append((finding, compiled_frames() - before))
        return finding

    monkeypatch.setattr(loss_check, "examine_loss", watched)
    *_, compiled = train(in_tmp, task, "bf16-mixed")
    assert found == [(Finding("sum"), 0)] and compiled > 0
