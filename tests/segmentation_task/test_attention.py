"""Attention within windows in one kernel: MONAI's mathematics, its weights, and other networks left alone."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import pytest
import torch
from monai.networks.nets import SwinUNETR
from monai.networks.nets.swin_unetr import WindowAttention
from torch import Tensor, nn

from shardwise.tasks.segmentation.attention import FusedWindowAttention, fuse_window_attention

HEADS, WIDTH = 3, 24


def pair(window: tuple[int, ...], **options: float) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(1)
    plain = WindowAttention(WIDTH, HEADS, window, qkv_bias=True, **options)
    with torch.no_grad():
        plain.relative_position_bias_table.mul_(50)  # as drawn, it would hardly be felt
    return plain, fuse_window_attention(copy.deepcopy(plain))


def result(module: nn.Module, rows: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
    rows = rows.clone().requires_grad_()
    found = module(rows, mask)
    found.cos().sum().backward()
    gradients = {name: weight.grad for name, weight in module.named_parameters()}
    return {"output": found.detach(), "input's gradient": rows.grad, **gradients}


@pytest.mark.parametrize(
    ("window", "voxels"), [((3, 3, 3), 27), ((4, 4), 16), ((4, 4, 4), 32)], ids=["3D", "2D", "a window cut short"]
)
@pytest.mark.parametrize("windows", [None, 4], ids=["as they lie", "shifted"])
def test_output_and_gradients_are_those_of_monai(window: tuple[int, ...], voxels: int, windows: int | None) -> None:
    plain, fused = pair(window)
    rows = torch.randn(8, voxels, WIDTH)
    mask = None if windows is None else -100.0 * (torch.rand(windows, voxels, voxels) < 0.3)
    wanted, found = result(plain, rows, mask), result(fused, rows, mask)
    assert type(fused) is FusedWindowAttention
    assert float(wanted["relative_position_bias_table"].abs().max()) > 0.01
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, msg=partial("{}: {}".format, name))


@pytest.mark.slow
def test_a_whole_network_computes_what_it_did() -> None:
    torch.manual_seed(0)
    # In double: instance norm over the two voxels of the last stage makes much of a rounding.
    plain = SwinUNETR(in_channels=1, out_channels=2, feature_size=12).double()
    fused = fuse_window_attention(copy.deepcopy(plain))
    kinds = [type(module) for module in fused.modules()]
    assert kinds.count(FusedWindowAttention) == 8 and WindowAttention not in kinds
    assert fused.state_dict().keys() == plain.state_dict().keys()
    image = torch.randn(1, 1, 64, 32, 32, dtype=torch.double)
    for network in (plain, fused):
        network(image).square().mean().backward()
    for (name, wanted), found in zip(plain.named_parameters(), fused.parameters(), strict=True):
        scale = max(float(wanted.grad.norm()), 1e-6)
        assert float((found.grad - wanted.grad).norm()) < 1e-9 * scale, name
    again = pickle.loads(pickle.dumps(fused)).eval()
    with torch.no_grad():
        assert torch.equal(again(image), fused.eval()(image))


def test_chance_in_training_is_kept_and_none_in_evaluation() -> None:
    plain, fused = pair((3, 3, 3), attn_drop=0.5)
    rows = torch.randn(4, 27, WIDTH)
    with torch.no_grad():
        assert not torch.equal(fused(rows, None), fused(rows, None))
        torch.testing.assert_close(fused.eval()(rows, None), plain.eval()(rows, None))
