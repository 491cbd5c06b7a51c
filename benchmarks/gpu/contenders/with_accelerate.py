"""Hugging Face Accelerate."""

from __future__ import annotations

from benchmarks.gpu.contenders.meter import Meter
from benchmarks.gpu.contenders.problem import CLIP, DEVICE, Problem


def train(problem: Problem, meter: Meter) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16", cpu=DEVICE.type == "cpu")
    model = problem.build().train()
    model, optimizer, loader = accelerator.prepare(model, problem.optimizer(model), problem.loader())
    meter.ready()
    for step, batch in enumerate(loader):
        loss = problem.loss(model, batch)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        meter.done(loss, problem.units(step))
