"""AdamW in one pass: PyTorch's numbers, and the next copies with them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.engine.optimizer import _make_state
from shardwise.kernels import low_precision_adamw
from shardwise.kernels.low_precision_adamw import LowPrecisionAdamW
from shardwise.kernels.low_precision_weights import LowPrecisionWeights

SETTINGS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "fused": True}


@pytest.fixture(autouse=True)
def _small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_precision_adamw, "LARGE", 64)
    monkeypatch.setattr(LowPrecisionAdamW, "compiled", False)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 8))


class Trained:
    def __init__(self, *, at_once: bool) -> None:
        self.model = model()
        self.narrow = LowPrecisionWeights(self.model, torch.bfloat16)
        self.narrow.collect_as_they_come()
        self.narrow.collecting = not at_once
        kind = LowPrecisionAdamW if at_once else torch.optim.AdamW
        self.optimizer = kind(self.model.parameters(), **SETTINGS)
        _make_state(self.optimizer)
        if isinstance(self.optimizer, LowPrecisionAdamW):
            self.optimizer.copies = self.narrow

    def step(self, seed: int, *, scale: float | None = None, found: float = 0.0) -> None:
        rows = torch.randn(32, 8, generator=torch.Generator().manual_seed(seed))
        with self.narrow.in_place(), torch.autocast("cpu", dtype=torch.bfloat16):
            self.model(rows).square().sum().backward()
        if self.narrow.collecting:
            self.narrow.collect()
        self.optimizer.grad_scale = None if scale is None else torch.tensor(scale)  # type: ignore[attr-defined]
        self.optimizer.found_inf = torch.tensor(found)  # type: ignore[attr-defined]
        self.optimizer.step()
        self.optimizer.zero_grad()


def assert_same(one: Trained, other: Trained) -> None:
    for (name, mine), theirs in zip(one.model.named_parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6, msg=partial("{}: {}".format, name))
        state, expected = one.optimizer.state[mine], other.optimizer.state[theirs]
        assert state.keys() == expected.keys()
        for key in state:
            torch.testing.assert_close(state[key], expected[key], rtol=1e-5, atol=1e-6)


def test_weights_and_state_are_those_of_pytorchs_fused_adamw() -> None:
    one, other = Trained(at_once=True), Trained(at_once=False)
    for seed in range(5):
        for each in (one, other):
            each.step(seed, scale=3.0 if seed % 2 else None)
    assert_same(one, other)
    assert one.optimizer.state_dict()["param_groups"] == other.optimizer.state_dict()["param_groups"]


def test_a_step_that_is_not_finite_leaves_everything_as_it_is() -> None:
    one, other = Trained(at_once=True), Trained(at_once=True)
    for each in (one, other):
        each.step(0)
    one.step(1, scale=float("nan"), found=1.0)
    assert_same(one, other)
    for each in (one, other):
        each.step(2)
    assert_same(one, other)


def test_gradients_of_several_micro_batches_come_from_the_masters() -> None:
    one, other = Trained(at_once=True), Trained(at_once=False)
    one.narrow.collecting = True
    for each in (one, other):
        each.step(0)
        each.step(1)
    assert_same(one, other)
