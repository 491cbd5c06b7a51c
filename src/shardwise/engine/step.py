"""The training step. Everything that trains goes through `run_step`: the command line, a user's own loop, the tests.

take k micro-batches from the cursor
agree: all-reduce (sum of counts, stop flag, bad-value flag)                    one tiny collective
for each micro-batch: forward, loss.sum * copies / global_count, backward       gradients reduced on the last only
clip by the true global norm
optimizer.step, schedule.step

The forward passes, and the one division of the loss, are in forward_passes.py. On a GPU the host does not wait for any of it
(run_ahead.py). A step whose numbers are bad changes nothing (skipping.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from shardwise.config.seeds import Purpose
from shardwise.data import StepBatch
from shardwise.data.seeding import seed_everything
from shardwise.engine.forward_passes import ForwardPasses
from shardwise.engine.loss_guard import BadLoss, LossHistory, nonfinite_before
from shardwise.engine.parts import Parts
from shardwise.engine.run_ahead import update_ahead
from shardwise.engine.skipping import update_or_skip
from shardwise.engine.step_result import StepResult
from shardwise.errors import ShardwiseError
from shardwise.parallel.gather import Scope, gathering
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
    scope = Scope(parts.strategy.layout, len(batch.micro), cuts_rows=parts.strategy.cuts_rows)
    passes = ForwardPasses(parts, batch, step + 1, agreed.count, scope)
    with gathering(scope):
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


class _Clock:
    def __init__(self, wait: float) -> None:
        self.times = {"wait": wait}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.times[name] = now - self._last
        self._last = now
