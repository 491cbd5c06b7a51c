"""What makes a GPU fast, on one: compiled blocks, fp8, a host that does not wait, updates in one pass."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.engine.session import Session
from shardwise.kernels import low_precision_adamw
from shardwise.kernels.cross_entropy import linear_cross_entropy
from shardwise.kernels.low_precision_adamw import LowPrecisionAdamW, update
from tests.distributed import work
from tests.distributed.pool import RankPool
from tests.tasks import config_of

pytestmark = pytest.mark.gpu

TEXT = """
task: chess
data: {num_games: 400, max_plies: 60}
tokenizer: {max_seq_len: 64}
model: {architecture: llama, hidden_dim: 256, num_layers: 3, num_heads: 4}
training: {device: cuda, precision: bf16-mixed, batch_size: 16, gradient_clip: 1.0, compile: true, optimizer: {lr: 0.001}}
"""


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_compiled_blocks_learn_what_plain_ones_do_and_resume(ranks: RankPool, tmp_path: Path, strategy: str) -> None:
    options = [f"training.strategy={strategy}", *work.folder_of(tmp_path)]
    plain = ranks.run(1, functools.partial(work.train, steps=12), TEXT, [*options, "training.compile=false"])[0]
    whole = ranks.run(1, functools.partial(work.train, steps=12), TEXT, options)[0]
    assert whole["losses"] == pytest.approx(plain["losses"], rel=0.01)
    first = ranks.run(1, functools.partial(work.train, steps=6, save=True), TEXT, options)[0]
    rest = ranks.run(1, functools.partial(work.train, steps=12, resume=first["checkpoint"]), TEXT, options)[0]
    assert first["losses"] + rest["losses"] == pytest.approx(whole["losses"], rel=0.003)


def test_fp8_learns_what_bf16_does(ranks: RankPool, tmp_path: Path) -> None:
    options = ["training.strategy=single", "training.max_epochs=4", *work.folder_of(tmp_path)]
    wide = ranks.run(1, work.train, TEXT, options)[0]["losses"]
    narrow = ranks.run(1, work.train, TEXT, [*options, "training.precision=fp8-mixed"])[0]["losses"]
    assert narrow != wide
    assert sum(narrow[-10:]) == pytest.approx(sum(wide[-10:]), rel=0.02)


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_the_host_waits_for_nothing_between_two_lines_of_the_log(
    ranks: RankPool, tmp_path: Path, strategy: str
) -> None:
    # Every batch has a game of 32 moves or more: all have one shape, and nothing is compiled once steps have been made.
    options = [f"training.strategy={strategy}", "tokenizer.max_seq_len=32", *work.folder_of(tmp_path)]
    ranks.run(1, work.with_session, TEXT, options, _never_waits)


def _never_waits(session: Session) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(low_precision_adamw, "LARGE", 1024)  # so that what large matrices go through is among it
        _run_without_waiting(session)


def _run_without_waiting(session: Session) -> None:
    steps = session.batches()
    for _ in range(4):  # compiled, measured, warmed up
        session.step(next(steps))
    for _ in range(3):
        batch = next(steps)
        torch.cuda.set_sync_debug_mode("error")
        try:
            session.step(batch)  # waits for the event of the step before, which this mode does not count
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert session.parts.runs_ahead


def test_the_compiled_update_is_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_precision_adamw, "LARGE", 1)
    generator = torch.Generator("cuda").manual_seed(0)
    for size in (1024, 5000):
        given: dict[str, Any] = {
            "weight": torch.randn(size, device="cuda", generator=generator),
            "gradient": torch.randn(size, device="cuda", generator=generator).bfloat16(),
            "mean": torch.randn(size, device="cuda", generator=generator),
            "square": torch.rand(size, device="cuda", generator=generator),
            "numbers": torch.tensor([1e-3 / 0.271, 0.0547, 0.999, 2.0, 0.0, 0.0, 0.0, 0.0], device="cuda"),
        }
        plain = {name: tensor.clone() for name, tensor in given.items()}
        update(**plain, first=0.9, second=0.999, eps=1e-8)
        low_precision_adamw._compiled()(*given.values(), 0.9, 0.999, 1e-8)
        for name, tensor in given.items():
            torch.testing.assert_close(tensor, plain[name], rtol=1e-5, atol=1e-6)


def test_large_matrices_are_updated_in_one_pass(ranks: RankPool, tmp_path: Path) -> None:
    options = ["training.strategy=single", *work.folder_of(tmp_path)]
    usual = ranks.run(1, functools.partial(work.train, steps=8), TEXT, options)[0]["losses"]
    assert ranks.run(1, _train_in_one_pass, TEXT, options)[0] == pytest.approx(usual, rel=0.003)


def _train_in_one_pass(text: str, options: list[str]) -> list[float]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(low_precision_adamw, "LARGE", 1024)
        with Session(config_of(text, options)) as session:
            session.prepare()
            assert isinstance(session.parts.optimizer, LowPrecisionAdamW)
            found = []
            for batch in session.batches():
                found.append(session.loss(session.step(batch)))
                if len(found) == 8:
                    return found
    raise AssertionError("too few steps")


def test_the_compiled_loss_is_the_plain_one() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(5000, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = nn.Parameter(torch.randn(1000, 64, device="cuda", dtype=torch.bfloat16))
    targets = torch.randint(0, 1000, (5000,), device="cuda")
    targets[:100] = -100
    found = []
    for compiled in (False, True):
        loss = linear_cross_entropy(hidden, weight, targets, compiled=compiled)
        found.append((loss, *torch.autograd.grad(loss, (hidden, weight))))
    for one, other in zip(*found, strict=True):
        assert float((one - other).float().norm() / one.float().norm()) < 5e-3
