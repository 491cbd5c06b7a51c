"""The training step. Everything that trains goes through `run_step`: the command line, a user's own loop, the tests.

take k micro-batches from the cursor
agree: all-reduce (sum of counts, stop flag, bad-value flag)                    one tiny collective
for each micro-batch: forward, loss.sum * copies / global_count, backward       gradients reduced on the last only
clip by the true global norm
optimizer.step, schedule.step

On a GPU the host does not wait for any of it (run_ahead.py). A step whose numbers are bad changes nothing (skipping.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from shardwise.config.seeds import Purpose
from shardwise.data import MicroBatch, StepBatch
from shardwise.data.seeding import seed_everything
from shardwise.engine.forward_timer import ForwardTimer
from shardwise.engine.loss_guard import BadLoss, LossHistory, nonfinite_before
from shardwise.engine.parts import Parts
from shardwise.engine.run_ahead import update_ahead
from shardwise.engine.skipping import update_or_skip
from shardwise.engine.step_result import StepResult
from shardwise.errors import ShardwiseError
from shardwise.tasks import Loss
from shardwise.watch.heartbeats import Phase, beat


def run_step(
    parts: Parts,
    batch: StepBatch,
    step: int,
    *,
    stop: bool = False,
    bad: BadLoss | None = None,
    losses: LossHistory | None = None,
    gradients_ready: Callable[[], None] = lambda: None,
) -> StepResult:
    """One optimizer step on one global batch, after `step` others.

    `stop`: this rank was asked to stop. `bad`: this rank's loss of the step before was not finite. `losses`: those of the
    last steps, to tell a spike by. `gradients_ready`: called when they are whole, before they are clipped.
    """
    clock = _Clock(batch.wait)
    agreed = _agree(parts, batch, step, stop, bad)
    clock.lap("agree")
    if agreed.stop:
        return StepResult(step + 1, stopped=True)

    seed_everything(
        parts.config.seed, Purpose.STEP, step, parts.strategy.layout.random_rank
    )  # dropout differs, and resumes
    passes = ForwardPasses(parts, batch, step + 1, agreed.count)
    parts.strategy.forward_backward(batch.micro, passes.forward)
    clock.lap("compute")
    if (idle := parts.strategy.idle_seconds(clock.times["compute"])) is not None:
        clock.times["idle"] = idle

    beat(Phase.UPDATE, step + 1)
    parts.scaler.unscale_(parts.optimizer)
    norm = parts.strategy.gradient_norm(parts.parameters, step + 1)
    gradients_ready()

    result = StepResult(step + 1, lr=parts.schedule.rate(step), samples=batch.samples, times=clock.times)
    result.count, result.global_count = agreed.own_count, int(agreed.count)
    parts.set_rate(result.lr)
    if parts.runs_ahead:
        update_ahead(parts, result, norm, passes)
    else:
        update_or_skip(parts, result, norm, passes, losses or LossHistory())
    parts.optimizer.zero_grad()
    clock.lap("update")
    return result


def loss_weight(copies: int, global_count: float, micro_count: int) -> float:
    """What a micro-batch's summed loss is multiplied by: the one place where a loss is divided."""
    return copies / global_count


@dataclass(frozen=True)
class _Agreed:
    """What all ranks know after the small collective at the beginning of a step."""

    count: float
    """Of all ranks: what the loss is divided by."""
    own_count: int
    stop: bool


def _agree(parts: Parts, batch: StepBatch, step: int, stop: bool, bad: BadLoss | None) -> _Agreed:
    beat(Phase.AGREE, step + 1)
    own_count = batch.count if parts.strategy.layout.counts else 0
    count, stops, bads = parts.world.sum(own_count, stop, bad is not None)
    if bads and parts.config.training.on_nonfinite == "stop":
        raise nonfinite_before(parts, step, bad)
    if not count and not stops and not parts.task.may_count_nothing:
        raise ShardwiseError(
            f"step {step + 1}: no rank has anything to count: the task's count(batch) is 0 for the whole batch"
        )
    return _Agreed(count, own_count, bool(stops))


class ForwardPasses:
    """The forward passes of one step on this rank, and what is remembered of them."""

    def __init__(self, parts: Parts, batch: StepBatch, step: int, global_count: float) -> None:
        """`step`: its number, from 1."""
        self.parts, self.batch, self.step, self.global_count = parts, batch, step, global_count
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


class _Clock:
    def __init__(self, wait: float) -> None:
        self.times = {"wait": wait}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.times[name] = now - self._last
        self._last = now
