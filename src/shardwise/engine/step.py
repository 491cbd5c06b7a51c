"""The training step. Everything that trains goes through `run_step`: the command line, a user's own loop, the tests.

take k micro-batches from the cursor
agree: all-reduce (sum of counts, stop flag, bad-value flag)                    one tiny collective
for each micro-batch: forward, loss.sum * copies / global_count, backward       gradients reduced on the last only
clip by the true global norm
optimizer.step, schedule.step

On a GPU the host does not wait for any of it: it prepares the next step meanwhile, and learns of loss and norm one step
later (`StepResult.settle`). A step whose gradient is not finite changes nothing: the device itself leaves the update out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from shardwise.checkpoint.state import local_part
from shardwise.config import Config
from shardwise.config.seeds import Purpose
from shardwise.data import MicroBatch, StepBatch
from shardwise.data.seeding import seed_everything
from shardwise.engine.clip import clip, global_norm, gradients
from shardwise.engine.forward_timer import ForwardTimer
from shardwise.engine.loss_guard import (
    BadLoss,
    LossHistory,
    Verdict,
    brief,
    convict,
    judge,
    may_skip,
    stop_because,
    watches_loss,
    what_happened,
)
from shardwise.engine.precision import Precision
from shardwise.engine.schedule import Schedule
from shardwise.errors import ShardwiseError
from shardwise.parallel import ParallelModel, World
from shardwise.tasks import Loss, Task
from shardwise.watch.heartbeats import Phase, beat

SMALLEST_SCALE = 2.0**-24
"""A loss scale that has been halved down to here cannot be what makes fp16 gradients overflow."""


@dataclass
class Parts:
    """What a step needs, built once by Session.prepare."""

    config: Config
    task: Task
    world: World
    spread: ParallelModel
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    precision: Precision
    scaler: torch.amp.GradScaler

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    @cached_property
    def runs_ahead(self) -> bool:
        """Whether the host goes on while the device computes: where nothing but "not finite" can keep a step from being
        made, and PyTorch's optimizer can look at that by itself."""
        training = self.config.training
        if self.world.device.type != "cuda" or self.spread.pipeline is not None or self.scaler.is_enabled():
            return False
        able = getattr(local_part(self.optimizer), "_step_supports_amp_scaling", False)
        return able and not watches_loss(training) and not may_skip(training)


@dataclass
class StepResult:
    """What a step came to. On a GPU, its numbers are known when the device has made it: who asks for them waits."""

    step: int
    """Number of this step, from 1, as in the log."""
    stopped: bool = False
    """A rank asked to stop, so all left this step undone."""
    skipped: bool = False
    """The numbers were bad, so no weight was changed."""
    verdict: Verdict | None = None
    """What was bad, where that is more than how fp16 finds its loss scale, and what is done about it."""
    trouble: str = ""
    """What was bad and on which samples, in a sentence."""
    bad_loss: BadLoss | None = None
    """This rank's loss was not finite, which the others learn at the next step."""
    loss: float | None = None
    """Of all ranks, where it is watched before the update (see numbers.py)."""
    count: int = 0
    global_count: int = 0
    lr: float = 0.0
    samples: int = 0
    """Of all ranks."""
    times: dict[str, float] = field(default_factory=dict)
    """Seconds in each phase: wait for data, agree, compute, update; of compute, this rank's own forward passes, and in a
    pipeline, idle."""

    numbers: tuple[float, float] = (0.0, 0.0)
    """The gradient's norm and this rank's summed loss, as far as they are known."""
    device_idle: bool = False
    """The device had made this step before the host had prepared the next."""
    awaited: Callable[[], None] | None = None
    """Waits for the device, and fills in what only it knows."""

    @property
    def grad_norm(self) -> float:
        """Over all ranks, before clipping."""
        return self.settle().numbers[0]

    @property
    def loss_sum(self) -> float:
        """Of this rank. Session.loss reduces it over all ranks."""
        return self.settle().numbers[1]

    def settle(self) -> StepResult:
        """Until the device has made this step. All ranks call it together; it says if the numbers are bad."""
        if self.awaited is not None:
            wait, self.awaited = self.awaited, None
            wait()
        return self

    @property
    def rollback(self) -> bool:
        """The run goes back to its last checkpoint."""
        return self.verdict is not None and self.verdict.act == "rollback"


def run_step(
    parts: Parts,
    batch: StepBatch,
    step: int,
    *,
    stop: bool = False,
    bad: BadLoss | None = None,
    losses: LossHistory | None = None,
) -> StepResult:
    """One optimizer step on one global batch, after `step` others.

    `stop`: this rank was asked to stop. `bad`: this rank's loss of the step before was not finite. `losses`: those of the
    last steps, to tell a spike by.
    """
    world, training = parts.world, parts.config.training
    clock = _Clock(batch.wait)

    layout = parts.spread.layout
    own_count = batch.count if layout.counts else 0
    beat(Phase.AGREE, step + 1)
    count, stops, bads = world.sum(own_count, stop, bad is not None)
    clock.lap("agree")
    if bads and training.on_nonfinite == "stop":
        raise nonfinite_before(parts, step, bad)
    if stops:
        return StepResult(step + 1, stopped=True)
    if not count and not parts.task.may_count_nothing:
        raise ShardwiseError(
            f"step {step + 1}: no rank has anything to count: the task's count(batch) is 0 for the whole batch"
        )

    # Dropout differs between ranks, and resumes.
    seed_everything(parts.config.seed, Purpose.STEP, step, layout.random_rank)
    total = torch.zeros((), device=world.device)
    seen: list[tuple[MicroBatch, torch.Tensor]] = []
    kept = [(buffer, buffer.clone()) for buffer in parts.spread.statistics] if may_skip(training) else []

    forwards = ForwardTimer(parts.spread)

    def forward(model: nn.Module, micro: MicroBatch) -> torch.Tensor:
        beat(Phase.COMPUTE, step + 1)
        with parts.precision.autocast(), forwards.running():
            loss = _loss_of(parts, model, micro, step + 1)
        # Gradients are averaged over the copies of the model, hence × copies; a borrowed sample counts nothing.
        weight = 0.0 if micro.request.borrowed else loss_weight(layout.data_size, count or 1, micro.count)
        if layout.counts and not micro.request.borrowed:
            total.add_(loss.sum.detach())
            seen.append((micro, loss.sum.detach().clone()))  # what a CUDA graph gives is written over in the next step
        return parts.scaler.scale(loss.sum * weight)

    if parts.spread.pipeline is not None:
        parts.spread.pipeline.run(_filled(batch.micro, parts.spread.pipeline.micro_batches), forward)
    else:
        with parts.spread.computing():
            for position, micro in enumerate(batch.micro):
                with parts.spread.reducing_gradients(now=position == len(batch.micro) - 1, only=len(batch.micro) == 1):
                    forward(parts.spread.model, micro).backward()
    clock.lap("compute")
    if parts.spread.pipeline is not None and world.device.type == "cpu":  # on CUDA the host does not see when work ends
        clock.times["idle"] = clock.times["compute"] - parts.spread.pipeline.busy

    beat(Phase.UPDATE, step + 1)
    parts.scaler.unscale_(parts.optimizer)
    grads = gradients(parts.parameters, parts.spread.gradient_of)
    lacking = len(parts.parameters) - len(grads) if parts.spread.needs_every_gradient else 0
    if parts.spread.pipeline is None:
        if not grads:
            raise ShardwiseError(
                f"step {step + 1}: no parameter got a gradient: does the loss depend on the model's parameters?"
            )
        if lacking:
            raise _unused_parameters(parts, step + 1)
    on_device = torch.stack([*_norm(parts, grads, lacking), total])
    result = StepResult(
        step + 1,
        count=own_count,
        global_count=int(count),
        lr=parts.schedule.rate(step),
        samples=batch.samples,
        times=clock.times,
    )
    for group in parts.optimizer.param_groups:
        group["lr"] = result.lr
    if parts.runs_ahead:
        result.awaited = _numbers_of(parts, batch, result, on_device, seen, forwards)
        _update_if_finite(parts, on_device[0])
        parts.optimizer.zero_grad()
        clock.lap("update")
        return result
    norm, *lacking_somewhere, loss_sum = on_device.tolist()
    if any(lacking_somewhere):  # on any stage, and every stage knows
        raise _unused_parameters(parts, step + 1)
    clock.times["forward"] = forwards.seconds()
    loss = world.sum(loss_sum)[0] / count if watches_loss(training) and count else None
    # The norm and the loss are the same on every rank, and so is the verdict.
    verdict = judge(training, norm, loss, losses or LossHistory(), scaled=parts.scaler.is_enabled())
    result.numbers, result.loss = (norm, loss_sum), loss
    result.skipped = not math.isfinite(norm) or verdict is not None
    if not math.isfinite(loss_sum):
        result.bad_loss = _bad_loss(parts, batch, result, seen)
    if verdict is not None:
        blamed = convict(parts, verdict, _bad_loss(parts, batch, result, seen, verdict.limit))
        if verdict.act == "stop":
            raise stop_because(step + 1, verdict, blamed)
        result.verdict, result.trouble = verdict, what_happened(verdict, blamed)
    if result.skipped:
        _leave_as_it_was(parts, kept, finite=math.isfinite(norm))
    else:
        if training.gradient_clip is not None:
            clip(grads, norm, training.gradient_clip)
        parts.scaler.step(parts.optimizer)
        parts.scaler.update()
    if result.skipped and parts.scaler.is_enabled() and parts.scaler.get_scale() < SMALLEST_SCALE:
        mine = result.bad_loss or _bad_loss(parts, batch, result, seen)
        hopeless = Verdict("nonfinite", "stop")
        raise stop_because(step + 1, hopeless, convict(parts, hopeless, mine))
    parts.optimizer.zero_grad()
    clock.lap("update")
    return result


def _update_if_finite(parts: Parts, norm: torch.Tensor) -> None:
    """Clips and updates, or leaves everything as it is, without the host knowing which."""
    limit = parts.config.training.gradient_clip
    optimizer: Any = local_part(parts.optimizer)
    # PyTorch's fused optimizers divide gradients by the one, and do nothing where the other is not 0.
    optimizer.grad_scale = None if limit is None else ((norm + 1e-6) / limit).clamp(min=1.0)
    optimizer.found_inf = (~norm.isfinite()).float()
    parts.optimizer.step()


def _numbers_of(
    parts: Parts,
    batch: StepBatch,
    result: StepResult,
    on_device: torch.Tensor,
    seen: list[tuple[MicroBatch, torch.Tensor]],
    forwards: ForwardTimer,
) -> Callable[[], None]:
    """Brings the norm and the loss to the host, without waiting for them; what is returned waits, and looks at them."""
    on_host = torch.empty(on_device.shape, pin_memory=on_device.is_cuda)
    on_host.copy_(on_device, non_blocking=True)
    arrived = torch.cuda.Event() if on_device.is_cuda else None
    if arrived is not None:
        arrived.record()

    def known() -> None:
        if arrived is not None:
            result.device_idle = arrived.query()
            arrived.synchronize()
        norm, loss_sum = result.numbers = tuple(on_host.tolist())
        result.times["forward"] = forwards.seconds()
        if not math.isfinite(loss_sum):
            result.bad_loss = _bad_loss(parts, batch, result, seen)
        if not math.isfinite(norm):  # on every rank
            verdict = Verdict("nonfinite", "stop")
            raise stop_because(result.step, verdict, convict(parts, verdict, _bad_loss(parts, batch, result, seen)))

    return known


def loss_weight(copies: int, global_count: float, micro_count: int) -> float:
    """What a micro-batch's summed loss is multiplied by: the one place where a loss is divided."""
    return copies / global_count


def _filled(micro: list[MicroBatch], number: int) -> list[MicroBatch]:
    """As many micro-batches as a pipeline is made for: a short batch is filled up with one that counts nothing."""
    idle = replace(micro[0], count=0, request=replace(micro[0].request, borrowed=True))
    return [*micro, *[idle] * (number - len(micro))]


def _norm(parts: Parts, grads: list[torch.Tensor], lacking: int) -> list[torch.Tensor]:
    """Of the gradient of the whole model, wherever its parts are; in a pipeline, with how many parameters have none."""
    pipeline = parts.spread.pipeline
    if pipeline is None:
        return [global_norm(grads).to(parts.world.device)]
    elsewhere = pipeline.counted_elsewhere
    own = gradients(each for each in parts.parameters if id(each) not in elsewhere)
    return pipeline.norm_over_stages(global_norm(own).to(parts.world.device), lacking)


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


def _unused_parameters(parts: Parts, step: int) -> ShardwiseError:
    named = parts.spread.module.named_parameters()
    unused = [name for name, each in named if each.requires_grad and parts.spread.gradient_of(each) is None]
    if parts.spread.pipeline is not None:  # each stage knows its own
        stages = parts.spread.pipeline.of_all_stages(unused)
        unused = list(dict.fromkeys(name for names in stages for name in names))
    return ShardwiseError(
        f"step {step}: {len(unused)} parameter(s) got no gradient, of which strategy {_wanting(parts)} must know beforehand: "
        f"{brief(unused)}.\n  {_remedy(parts)}freeze or remove them"
    )


def _wanting(parts: Parts) -> str:
    return parts.config.strategy_on(parts.world.size)


def _remedy(parts: Parts) -> str:
    if parts.spread.pipeline is not None:
        return "Register them on the side of the blocks where they are used (before or after), or "
    return "Set training.ddp.find_unused_parameters: true, or "


def nonfinite_before(parts: Parts, step: int, bad: BadLoss | None) -> ShardwiseError:
    """The loss of the step before was not finite on some rank, and its gradient did not show it. Every rank comes here."""
    verdict = Verdict("nonfinite", "stop")
    mine = bad or BadLoss(step, 0, parts.world.rank, None, [], guilty=False)
    return stop_because(step, verdict, convict(parts, verdict, mine))


def _bad_loss(
    parts: Parts,
    batch: StepBatch,
    result: StepResult,
    seen: list[tuple[MicroBatch, torch.Tensor]],
    limit: float = math.inf,
) -> BadLoss:
    """What this rank has to do with a bad step. Only here, when it is too late anyway, are single losses looked at."""
    bad = [micro for micro, loss in seen if not float(loss) <= limit * max(1, micro.count) or not loss.isfinite()]
    found = [
        index for micro in bad or batch.micro if not micro.request.borrowed for index in micro.request.ids.tolist()
    ]
    loss = result.loss_sum / result.count if result.count else None
    return BadLoss(result.step, batch.epoch, parts.world.rank, loss, found, guilty=bool(bad))


def _leave_as_it_was(parts: Parts, kept: list[tuple[torch.Tensor, torch.Tensor]], *, finite: bool) -> None:
    """Nothing of a step that was left out stays, but what the loss scale of fp16 learns from it."""
    with torch.no_grad():
        for buffer, before in kept:
            buffer.copy_(before)
    if parts.spread.memory is not None and not finite:
        parts.spread.memory.forget()
    if parts.scaler.is_enabled():
        parts.scaler.update()


class _Clock:
    def __init__(self, wait: float) -> None:
        self.times = {"wait": wait}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.times[name] = now - self._last
        self._last = now
