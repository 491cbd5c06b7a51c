"""Cells and volumes on a real GPU: what the CPU computes, the streaming loader's way to the device, every strategy."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from monai.networks.nets.swin_unetr import WindowAttention

from shardwise.tasks.segmentation.attention import fuse_window_attention
from tests.distributed import work
from tests.distributed.pool import RankPool
from tests.distributed.test_parity import assert_same_curve

pytestmark = pytest.mark.gpu

CELLS = """
task: cells
name: cells
data: {num_cells: 1500, num_genes: 100, num_types: 4, streaming: true, streaming_chunk_size: 50, streaming_shuffle_buffer: 500}
tokenizer: {max_genes: 32}
model: {hidden_dim: 64, num_layers: 2, num_heads: 4, pooling: mean}
training: {batch_size: 32, max_epochs: 4, gradient_clip: 1.0, optimizer: {lr: 0.003}}
"""
SEGMENTATION = """
task: segmentation
name: segmentation
data: {num_subjects: 12, size: [32, 32, 32], num_workers: 2}
model: {name: SegResNet, args: {init_filters: 8, blocks_down: [1, 1, 1], blocks_up: [1, 1]}, loss: dice_ce}
training: {batch_size: 2, max_epochs: 8, gradient_clip: 1.0, optimizer: {lr: 0.01}}
"""


def on(device: str, strategy: str, *more: str) -> list[str]:
    return [f"training.device={device}", f"training.strategy={strategy}", *more]


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
@pytest.mark.parametrize("text", [CELLS, SEGMENTATION], ids=["cells", "segmentation"])
def test_in_fp32_a_gpu_computes_what_the_cpu_does(ranks: RankPool, text: str, strategy: str) -> None:
    # Plain SGD: AdamW divides by the size of a gradient, so that where it is next to nothing, rounding decides the step.
    few = ["training.max_steps=4", "training.optimizer={name: sgd, lr: 0.1}"]
    expected = ranks.run(1, work.train, text, on("cpu", "single", *few))[0]
    result = ranks.run(1, work.train, text, on("cuda", strategy, *few, "data.num_workers=2"))[0]
    assert_same_curve(result, expected)


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
@pytest.mark.parametrize("tokens", ["rank_value", "binned_expression", "continuous_projection"])
def test_cells_are_learnt_in_bf16(ranks: RankPool, tmp_path: Path, strategy: str, tokens: str) -> None:
    overrides = on(
        "cuda", strategy, "training.precision=bf16-mixed", f"tokenizer.strategy={tokens}", "data.num_workers=2"
    )
    outcome = ranks.run(1, work.run_fit, CELLS, overrides, str(tmp_path))[0]
    assert outcome["after"]["loss"] < 0.97 * outcome["before"]["loss"]
    assert list((tmp_path / "runs" / "cells" / "pictures").glob("*.png"))


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
@pytest.mark.parametrize("mode", ["resize", "patches"])
def test_lesions_are_found_in_bf16(ranks: RankPool, tmp_path: Path, strategy: str, mode: str) -> None:
    overrides = on("cuda", strategy, "training.precision=bf16-mixed", f"data.spatial_mode={mode}")
    outcome = ranks.run(1, work.run_fit, SEGMENTATION, overrides, str(tmp_path))[0]
    assert outcome["after"]["dice"] > outcome["before"]["dice"] + 0.2


@pytest.mark.parametrize("windows", [None, 5], ids=["as they lie", "shifted"])
def test_attention_within_windows_is_monais_on_the_gpu(windows: int | None) -> None:
    torch.manual_seed(0)
    plain = WindowAttention(48, 3, (7, 7, 7), qkv_bias=True).cuda()
    with torch.no_grad():
        plain.relative_position_bias_table.mul_(30)
    fused = fuse_window_attention(copy.deepcopy(plain))
    rows = torch.randn(10, 343, 48, device="cuda")
    mask = None if windows is None else -100.0 * (torch.rand(windows, 343, 343, device="cuda") < 0.3)
    peaks = []
    for module in (plain, fused):
        torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", torch.bfloat16):
            module(rows, mask).float().cos().sum().backward()
        peaks.append(torch.cuda.max_memory_allocated())
    for (name, wanted), found in zip(plain.named_parameters(), fused.parameters(), strict=True):
        assert float((found.grad - wanted.grad).norm()) < 0.02 * float(wanted.grad.norm()), name
    assert peaks[1] < peaks[0]
