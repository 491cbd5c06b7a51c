"""The loop that somebody writes by hand."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Literal

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map_only

from benchmarks.gpu.contenders.meter import Meter
from benchmarks.gpu.contenders.problem import CLIP, DEVICE, Problem, on_device


def train(
    problem: Problem,
    meter: Meter,
    *,
    precision: Literal["bf16-mixed", "bf16-true"] = "bf16-mixed",
    compiler: str | None = None,
    graphs: bool = False,
    pieces: int = 1,
    attention: SDPBackend | None = None,
) -> None:
    """`compiler`: the whole model is compiled with it. `graphs`: and recorded as CUDA graphs. `pieces`: a batch goes through the
    model in so many parts.
    `attention`: the kernel that computes it, forward and backward."""
    model = problem.build().train()
    if precision == "bf16-true":
        model.to(torch.bfloat16)
    optimizer = problem.optimizer(model)
    mode = "reduce-overhead" if graphs and DEVICE.type == "cuda" else None
    forward: nn.Module = torch.compile(model, backend=compiler, mode=mode) if compiler else model  # type: ignore[assignment]
    meter.ready()
    for step, batch in enumerate(problem.loader()):
        batch = on_device(batch)
        total = torch.zeros((), device=DEVICE)
        if graphs:
            torch.compiler.cudagraph_mark_step_begin()
        for piece in range(pieces):
            part = tree_map_only(torch.Tensor, lambda tensor, n=piece: tensor.chunk(pieces)[n], batch)
            with sdpa_kernel(attention) if attention is not None else nullcontext():
                with torch.autocast(DEVICE.type, dtype=torch.bfloat16, enabled=precision == "bf16-mixed"):
                    loss = problem.loss(forward, part) / pieces
                loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        meter.done(total, problem.units(step))
