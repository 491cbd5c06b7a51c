"""Weights cast once per step."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import nn

from shardwise.kernels import low_precision_weights as module
from shardwise.kernels.low_precision_weights import LowPrecisionWeights


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(20, 8)
        self.norm = nn.LayerNorm(8)
        self.middle = nn.Linear(8, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.head(self.middle(self.norm(self.words(ids)))).float().square().sum()


def test_the_model_computes_with_copies_and_its_masters_get_the_gradients() -> None:
    model, ids = Tied(), torch.arange(10)
    masters = dict(model.named_parameters())
    narrow = LowPrecisionWeights(model, torch.bfloat16)
    narrow.collect_as_they_come()
    with narrow.in_place():
        assert model.middle.weight.dtype == torch.bfloat16 and model.words.weight is model.head.weight
        assert model.norm.weight.dtype == torch.float32
        model(ids).backward()
        narrow.collect()
    assert all(model.get_parameter(name) is master for name, master in masters.items())
    assert all(master.grad is not None and master.grad.dtype == torch.float32 for master in masters.values())
    found = {name: master.grad for name, master in masters.items()}
    model.zero_grad()
    model(ids).backward()
    for name, master in masters.items():
        assert master.grad is not None and found[name] is not None
        torch.testing.assert_close(found[name], master.grad, rtol=0.05, atol=0.05 * float(master.grad.abs().max()))


def test_micro_batches_are_added_up_in_fp32() -> None:
    """256 + 1 is 256 in bf16: a hundred small gradients after a large one would be lost."""
    model = nn.Linear(1, 1, bias=False)
    narrow = LowPrecisionWeights(model, torch.bfloat16)
    narrow.collect_as_they_come()
    with narrow.in_place():
        for size in [256.0, *[1.0] * 100]:
            model(torch.full((1, 1), size, dtype=torch.bfloat16)).sum().backward()
            narrow.collect()
    assert model.weight.grad is not None and model.weight.grad.item() == 356.0


def test_gradients_are_handed_over_during_the_backward_pass_when_there_are_many(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(module, "AT_ONCE", 1)
    model, ids = Tied(), torch.arange(10)
    narrow = LowPrecisionWeights(model, torch.bfloat16)
    narrow.collect_as_they_come()
    with narrow.in_place():
        model(ids).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_an_update_is_seen_at_the_next_step() -> None:
    model = nn.Linear(2, 2)
    narrow = LowPrecisionWeights(model, torch.bfloat16)
    with torch.no_grad():
        model.weight.fill_(3.0)
    with narrow.in_place():
        assert (model.weight == 3.0).all()


def test_nothing_is_held_when_the_model_is_let_go() -> None:
    model = Tied()
    narrow = LowPrecisionWeights(model, torch.bfloat16)
    narrow.collect_as_they_come()
    with narrow.in_place():
        model(torch.arange(10)).backward()
    left = [weakref.ref(each) for each in (narrow, *narrow.copies, *model.parameters())]
    del model, narrow
    gc.collect()
    assert not [each for each in left if each() is not None]
