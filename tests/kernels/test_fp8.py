"""Matrix products in eight bits. On the CPU the arithmetic can be tried, if not its speed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwise.errors import ConfigError
from shardwise.kernels.fp8 import Fp8Linear, use_fp8
from tests.distributed import work
from tests.distributed.pool import RankPool


def block() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 32), nn.Linear(32, 5)).bfloat16()


def test_the_linear_layers_of_blocks_are_replaced_in_place_and_those_that_do_not_fit_are_named() -> None:
    blocks = nn.ModuleList([block()])
    model = nn.ModuleDict({"blocks": blocks, "head": nn.Linear(64, 64)})
    names = list(model.state_dict())
    assert use_fp8(model, list(blocks)) == ["blocks.0.3"]
    assert list(model.state_dict()) == names
    assert [type(layer) for layer in model["blocks"][0]] == [Fp8Linear, nn.GELU, Fp8Linear, nn.Linear]  # type: ignore[index]
    assert type(model["head"]) is nn.Linear


@pytest.mark.parametrize("rows", [32, 7])
def test_outputs_and_gradients_are_those_of_bf16_to_the_digits_that_eight_bits_have(rows: int) -> None:
    torch.manual_seed(1)
    inputs = torch.randn(3, rows, 64).bfloat16()
    found = []
    for narrow in (False, True):
        model = nn.Linear(64, 128).bfloat16()
        with torch.no_grad():
            model.load_state_dict(_state())
        if narrow:
            use_fp8(nn.ModuleList([model]), [nn.Sequential(model)])
        given = inputs.clone().requires_grad_()
        output = model(given)
        (output.float() ** 2).sum().backward()
        found.append((output.detach(), given.grad, model.weight.grad, model.bias.grad))
    for one, other in zip(*found, strict=True):
        assert one is not None and other is not None and one.shape == other.shape
        assert (one - other).float().norm() / one.float().norm() < 0.1
        assert (one - other).float().norm() > 0 or one.ndim == 1, "it is not bf16"


def _state() -> dict[str, torch.Tensor]:
    torch.manual_seed(2)
    return nn.Linear(64, 128).bfloat16().state_dict()


def test_where_there_is_no_gpu_fp8_mixed_is_refused(ranks: RankPool) -> None:
    text = "task: tests.tasks:Ragged\ntraining: {precision: fp8-mixed, strategy: single}\n"
    with pytest.raises(AssertionError, match=f"{ConfigError.__name__}.*fp8-mixed: it needs a GPU; use bf16-mixed"):
        ranks.run(1, work.train, text, [])
