"""On a GPU the host does not wait for a step: it prepares the next one meanwhile, and learns of loss and norm one step later
(`StepResult.wait`). A step whose gradient is not finite changes nothing: the device itself leaves the update out."""

from __future__ import annotations

import math
from typing import Any

import torch

from shardwise.checkpoint.state import local_part
from shardwise.engine.forward_passes import ForwardPasses
from shardwise.engine.loss_guard import Decision, blame, stop_because
from shardwise.engine.parts import Parts
from shardwise.engine.step_result import StepResult


def update_ahead(parts: Parts, result: StepResult, norm: torch.Tensor, passes: ForwardPasses) -> None:
    """Clips and updates, or leaves everything as it is, without the host knowing which."""
    _read_later(parts, result, torch.stack([norm, passes.loss_sum]), passes)
    limit = parts.config.training.gradient_clip
    optimizer: Any = local_part(parts.optimizer)
    # PyTorch's fused optimizers divide gradients by the one, and do nothing where the other is not 0.
    optimizer.grad_scale = None if limit is None else ((norm + 1e-6) / limit).clamp(min=1.0)
    optimizer.found_inf = (~norm.isfinite()).float()
    parts.optimizer.step()
    parts.strategy.after_update(result.step)


def _read_later(parts: Parts, result: StepResult, on_device: torch.Tensor, passes: ForwardPasses) -> None:
    """Brings the norm and the loss to the host, without waiting for them; `result.awaited` waits, and looks at them."""
    on_host = torch.empty(on_device.shape, pin_memory=on_device.is_cuda)
    on_host.copy_(on_device, non_blocking=True)
    arrived = torch.cuda.Event() if on_device.is_cuda else None
    if arrived is not None:
        arrived.record()

    def wait() -> bool:
        done_before = arrived is not None and arrived.query()
        if arrived is not None:
            arrived.synchronize()
        norm, loss_sum = result.numbers = tuple(on_host.tolist())
        result.times["forward"] = passes.timer.seconds()
        if not math.isfinite(loss_sum):
            result.bad_loss = passes.bad_loss(result)
        if not math.isfinite(norm):  # on every rank
            decision = Decision("nonfinite", "stop")
            raise stop_because(result.step, decision, blame(parts, decision, passes.bad_loss(result)))
        return done_before

    result.awaited = wait
