"""The update, where the host looks at the numbers first: bad ones are skipped, blamed or end the run."""

from __future__ import annotations

import math

import torch

from shardwise.engine.forward_passes import ForwardPasses
from shardwise.engine.loss_guard import (
    Decision,
    LossHistory,
    blame,
    judge,
    stop_because,
    what_happened,
)
from shardwise.engine.parts import Parts
from shardwise.engine.step_result import StepResult
from shardwise.parallel.gradients import clip, gradients

SMALLEST_SCALE = 2.0**-24
"""A loss scale that has been halved down to here cannot be what makes fp16 gradients overflow."""


def update_or_skip(
    parts: Parts, result: StepResult, norm: torch.Tensor, passes: ForwardPasses, losses: LossHistory
) -> None:
    """Norm and loss are the same on every rank, and so is what is done about them."""
    training, scaler = parts.config.training, parts.scaler
    norm_seen, loss_sum = result.numbers = tuple(torch.stack([norm, passes.loss_sum]).tolist())
    result.times["forward"] = passes.timer.seconds()
    if training.watches_loss and passes.global_count:
        result.loss = parts.world.sum(loss_sum)[0] / passes.global_count
    decision = judge(training, norm_seen, result.loss, losses, scaled=scaler.is_enabled())
    result.skipped = not math.isfinite(norm_seen) or decision is not None
    if not math.isfinite(loss_sum):
        result.bad_loss = passes.bad_loss(result)
    if decision is not None:
        blamed = blame(parts, decision, passes.bad_loss(result, decision.limit))
        if decision.act == "stop":
            raise stop_because(result.step, decision, blamed)
        result.decision, result.trouble = decision, what_happened(decision, blamed)
    if result.skipped:
        _leave_as_it_was(parts, passes, finite=math.isfinite(norm_seen))
        _stop_if_hopeless(parts, result, passes)
        return
    if training.gradient_clip is not None:
        clip(gradients(parts.parameters, parts.strategy.gradient_of), norm_seen, training.gradient_clip)
    scaler.step(parts.optimizer)
    scaler.update()
    parts.strategy.after_update(result.step)


def _leave_as_it_was(parts: Parts, passes: ForwardPasses, *, finite: bool) -> None:
    """Nothing of a step that was skipped stays, but what the loss scale of fp16 learns from it."""
    with torch.no_grad():
        for buffer, before in passes.statistics:
            buffer.copy_(before)
    if not finite:
        parts.strategy.forget_extra_state()
    if parts.scaler.is_enabled():
        parts.scaler.update()


def _stop_if_hopeless(parts: Parts, result: StepResult, passes: ForwardPasses) -> None:
    if parts.scaler.is_enabled() and parts.scaler.get_scale() < SMALLEST_SCALE:
        mine = result.bad_loss or passes.bad_loss(result)
        hopeless = Decision("nonfinite", "stop")
        raise stop_because(result.step, hopeless, blame(parts, hopeless, mine))
