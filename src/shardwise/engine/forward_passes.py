"""The forward passes of a step: each micro-batch's loss, weighted so that gradients add up to those of the whole global batch."""

from __future__ import annotations

import math

import torch
from torch import nn

from shardwise.data import MicroBatch, StepBatch
from shardwise.engine.forward_timer import ForwardTimer
from shardwise.engine.loss_guard import BadLoss
from shardwise.engine.parts import Parts
from shardwise.engine.step_result import StepResult
from shardwise.errors import ShardwiseError
from shardwise.parallel.gather import Scope
from shardwise.tasks import Loss
from shardwise.watch.heartbeats import Phase, beat


def loss_weight(copies: int, global_count: float, micro_count: int) -> float:
    """What a micro-batch's summed loss is multiplied by: the one place where a loss is divided."""
    return copies / global_count


class ForwardPasses:
    """The forward passes of one step on this rank, and what is remembered of them."""

    def __init__(self, parts: Parts, batch: StepBatch, step: int, global_count: float, scope: Scope) -> None:
        """`step`: its number, from 1. `scope`: of what the loss gathers from all ranks."""
        self.parts, self.batch, self.step, self.global_count, self.scope = parts, batch, step, global_count, scope
        self.loss_sum = torch.zeros((), device=parts.world.device)
        self.losses: list[tuple[MicroBatch, torch.Tensor]] = []
        """Of each micro-batch, to find the samples to blame."""
        self.timer = ForwardTimer(parts.strategy.forward_clock)
        may_skip = parts.config.training.may_skip
        self.statistics = [(each, each.clone()) for each in parts.strategy.statistics] if may_skip else []
        """Buffers as they were before, where a step may be skipped."""

    def forward(self, model: nn.Module, micro: MicroBatch) -> torch.Tensor:
        """The weighted loss of a micro-batch, to be differentiated."""
        beat(Phase.COMPUTE, self.step)
        parts, layout, counts = self.parts, self.parts.strategy.layout, not micro.request.borrowed
        self.scope.borrowed = micro.request.borrowed
        with parts.precision.autocast(), self.timer.running():
            loss = _loss_of(parts, model, micro, self.step)
        # Gradients are averaged over the copies of the model, hence × copies; a borrowed sample counts nothing.
        weight = loss_weight(layout.data_size, self.global_count or 1, micro.count) if counts else 0.0
        if layout.counts and counts:
            self.loss_sum.add_(loss.sum.detach())
            self.losses.append(
                (micro, loss.sum.detach().clone())
            )  # what a CUDA graph gives is written over in the next step
        return parts.scaler.scale(loss.sum * weight)

    def bad_loss(self, result: StepResult, limit: float = math.inf) -> BadLoss:
        """What this rank has to do with a bad step. Only here, when it is too late anyway, are single losses looked at."""
        bad = [
            micro
            for micro, loss in self.losses
            if not float(loss) <= limit * max(1, micro.count) or not loss.isfinite()
        ]
        suspects = [micro for micro in bad or self.batch.micro if not micro.request.borrowed]
        found = [index for micro in suspects for index in micro.request.ids.tolist()]
        loss = result.loss_sum / result.count if result.count else None
        return BadLoss(self.step, self.batch.epoch, self.parts.world.rank, loss, found, guilty=bool(bad))


def _loss_of(parts: Parts, model: nn.Module, micro: MicroBatch, step: int) -> Loss:
    """The task's loss, and whether it is what a loss must be."""
    try:
        loss = parts.task.loss(model, micro.inputs)
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise ShardwiseError(
            f"step {step}: batch norm cannot take a micro-batch of one sample, as the last of an epoch may be. Choose a "
            "training.batch_size that leaves more than one sample per rank at the end, or add or remove a sample"
        ) from error
    if not isinstance(loss, Loss):
        raise ShardwiseError(f"step {step}: the task's loss() returned {type(loss).__name__}, not a Loss(sum, count)")
    if loss.sum.ndim:
        raise ShardwiseError(
            f"step {step}: the task's loss() has a sum of shape {tuple(loss.sum.shape)}; it must be a single number"
        )
    if not micro.request.borrowed:
        _check_count(loss.count, micro.count, step)
    return loss


def _check_count(said: int | torch.Tensor, expected: int, step: int) -> None:
    """The count that a loss reports is the one the ranks agreed on beforehand. Checked where it costs no waiting."""
    if isinstance(said, torch.Tensor):
        if said.is_cuda and step > 1:
            return
        said = int(said)
    if said != expected:
        raise ShardwiseError(
            f"step {step}: the task's loss() counted {said}, but its count(batch) said {expected} beforehand. "
            "The two must agree: the loss is divided by the sum of count(batch) over all ranks"
        )
