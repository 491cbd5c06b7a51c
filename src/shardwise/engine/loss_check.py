"""Whether the loss is a sum over samples, asked once per process, before its first step.

`Loss(sum=<a mean>, count=n)` trains without a word, at a rate that is too small by the size of a micro-batch. So half of the
first micro-batch's samples are put together twice over: that is a micro-batch of two parts which are alike. Sum and count of the
whole must be those of both parts, twice those of one; of a mean they are those of one.

Why the same samples twice, and not the two halves of the micro-batch: a mean over tokens of the whole lies somewhere between the
means of its halves, where exactly depends on their lengths; and the halves are padded to other lengths, which a model may notice.
Twice the same samples have the same padding, and the two answers are a factor of two apart, in any precision. Samples are put
together by the task's own collate, so nothing must be known of what a batch is.

Not seen is what twice the same samples do not show: a mean over tokens that is multiplied by the number of samples, say, or
statistics of the batch. `shardwise verify` sees those.

The model is asked without gradient and in evaluation mode, so that neither dropout nor a batch's statistics are in the answers.
Modes, buffers and random states are put back: the run is bit for bit what it is without this. All ranks make the same number
of forward passes, and come to one finding.
"""

from __future__ import annotations

import inspect
import logging
import math
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.compat.compiler import uncompiled
from shardwise.compat.modules import buffers_of
from shardwise.config.seeds import Purpose
from shardwise.data import MicroBatch, Reader, Repeated, StepBatch, read_beside
from shardwise.data.seeding import generators_kept, seed_everything
from shardwise.engine.observers import Observer
from shardwise.engine.parts import Parts
from shardwise.engine.run import Run
from shardwise.engine.user_task import OwnTask
from shardwise.errors import DataError, NoSum, ShardwiseError, one_line
from shardwise.kernels.types import COMPUTE_TYPES
from shardwise.tasks import Loss
from shardwise.watch.heartbeats import Phase, beat

TOLERANCE = 0.02
"""Two answers that differ by less, relative to the larger, are taken for equal. Rounding stays far below (a sum of thousands in
fp32: 1e-5; products in TF32: 1e-3), a mean differs from a sum by half. A term of the loss that is smaller is not seen."""
NARROW_TOLERANCE = 0.05
"""The same where numbers have eight or eleven binary digits: a micro-batch of another size may be multiplied in another order."""
SAME = 1e-5
"""A loss that is asked again with other random numbers is the same if it differs by less: it draws none. What is left is
rounding, for the samples come in another order every other time."""
ROUNDS = (1, 8, 24)
"""How often a loss has been asked for by the end of each round. A sum needs the first alone. What is no sum must be the same
eight times, for what is drawn may be the same by chance. If it is not, it takes statistics to tell a mean from a sum."""
CLEARLY = 6.0
"""So many standard errors must the averages of random draws be away from what they would be of a sum, to be those of a mean."""
NEARLY = 0.2
"""And so near to what they would be of a mean, as a share of that distance."""

Kind = Literal["sum", "mean", "count", "depends", "doubt", "unknown"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pair:
    """The loss of some samples, and of the same twice over."""

    once: float
    once_count: float
    twice: float
    twice_count: float
    narrow: bool = False
    """In numbers of eight or eleven binary digits."""


@dataclass(frozen=True)
class Finding:
    kind: Kind
    """mean: the loss does not grow with the samples. count: its count does not. depends: neither a mean nor a sum. doubt: more
    must be asked. unknown: it cannot be told."""
    said: str = ""
    """What was seen."""

    @property
    def wrong(self) -> bool:
        return self.kind in ("mean", "count", "depends")


class LossCheck(Observer):
    def __init__(self) -> None:
        self._done = False

    def before_step(self, run: Run, batch: StepBatch) -> None:
        if self._done:
            return
        self._done = True
        step = run.steps_done + 1
        finding = examine_loss(run.parts, run.train_data, batch, step)
        if finding.wrong:
            raise NoSum(message(run.parts, finding, step))
        log.debug(f"step {step}: whether the loss is a sum: {finding.kind} {finding.said}")


def examine_loss(parts: Parts, data: Any, batch: StepBatch, step: int) -> Finding:
    """All ranks come here together, and all get the same answer. `step`: the one about to be made, from 1."""
    trial, pairs, problem = _Trial(parts, data, batch.micro[0], step), [], ""
    mine = Finding("unknown")
    with _nothing_kept(parts):
        for draws in map(range, (0, *ROUNDS), ROUNDS):
            inputs, unreadable = trial.inputs(draws)
            if parts.world.sum(bool(unreadable))[0]:  # those that could go on would wait for the others
                return Finding("unknown", unreadable)
            for draw, (once, twice) in zip(draws, inputs, strict=True):
                try:
                    pairs.append(trial.pair(once, twice, draw))
                except _NoAnswer as error:
                    problem = str(error)
            mine = Finding("unknown", problem) if problem else judge(pairs, trial.samples, trial.whole)
            if not parts.world.sum(mine.kind == "doubt")[0]:
                break
    everyone = [Finding(**each) for each in parts.world.gather(asdict(mine))]
    wrong = [each for each in everyone if each.wrong]
    sums = [each for each in everyone if each.kind == "sum"]
    if len(wrong) > len(sums):  # else, what some saw has to do with their samples
        return wrong[0]
    return Finding("sum") if sums else Finding("unknown", mine.said)


# ---------------------------------------------------------------- what follows from the answers


def judge(pairs: Sequence[Pair], samples: int, whole: tuple[int, int] | None) -> Finding:
    """`samples`: those that were asked for once. `whole`: samples and count of the whole micro-batch, where they are known."""
    first = pairs[0]
    numbers = [number for pair in pairs for number in (pair.once, pair.once_count, pair.twice, pair.twice_count)]
    if not all(map(math.isfinite, numbers)):
        return Finding("unknown", "the loss is not finite")
    if any(pair.once_count <= 0 or pair.twice_count <= 0 for pair in pairs):
        return Finding("unknown", "there is nothing to count")
    if _is_rounding(first.once, first.once_count) or _is_rounding(first.twice, first.twice_count):
        return Finding("unknown", "the loss is zero")
    tolerance = NARROW_TOLERANCE if first.narrow else TOLERANCE
    is_sum = first.twice_count == 2 * first.once_count and _apart(first.twice, 2 * first.once) <= tolerance
    if len(pairs) < ROUNDS[1]:
        return Finding("sum" if is_sum else "doubt")
    if not all(_is_same(pair, first) for pair in pairs):
        return _judge_random(pairs, samples)
    return Finding("sum") if is_sum else _judge_repeatable(first, samples, whole, tolerance)


def _judge_repeatable(first: Pair, samples: int, whole: tuple[int, int] | None, tolerance: float) -> Finding:
    """Asked again with other random numbers, the loss was the same, and it is no sum."""
    grown = first.twice_count / first.once_count
    if grown != 2:
        if grown == 1 and (whole is None or whole[0] <= samples or whole[1] != first.once_count):
            # collate may leave out what comes twice, or take one sample only.
            return Finding("unknown", "the count of samples that come twice is that of the same samples once")
        if grown != 1 and _apart(first.twice, grown * first.once) <= tolerance:
            return Finding("unknown", f"of samples that come twice, {grown:.3g} times as much is counted, and summed")
        return Finding("count", _seen(first, samples))
    if _apart(first.twice, first.once) <= tolerance:
        return Finding("mean", _seen(first, samples))
    if any(_is_rounding(*each, narrow=first.narrow) for each in _answers(first)):
        return Finding("unknown", "the difference from a sum may be rounding")
    return Finding("depends", _seen(first, samples))


def _judge_random(pairs: Sequence[Pair], samples: int) -> Finding:
    """The loss is another one every time. Only what is clearly a mean is called one."""
    once, twice = [pair.once for pair in pairs], [pair.twice for pair in pairs]
    grown = sum(pair.twice_count for pair in pairs) / sum(pair.once_count for pair in pairs)
    spread = math.sqrt((statistics.variance(twice) + grown**2 * statistics.variance(once)) / len(pairs))
    to_mean = abs(statistics.fmean(twice) - statistics.fmean(once))
    to_sum = abs(statistics.fmean(twice) - grown * statistics.fmean(once))
    far, near = max(to_mean, to_sum), min(to_mean, to_sum)
    if grown > 1.5 and near <= NEARLY * far and far > CLEARLY * spread:
        if to_sum < to_mean:
            return Finding("sum")
        averages = Pair(statistics.fmean(once), 0, statistics.fmean(twice), 0)
        return Finding(
            "mean", f"{_seen(averages, samples)} (averages of {len(pairs)}, for it is another one every time)"
        )
    return Finding("doubt") if len(pairs) < ROUNDS[-1] else Finding("unknown", "the loss is another one every time")


def _answers(pair: Pair) -> list[tuple[float, float]]:
    return [(pair.once, pair.once_count), (pair.twice, pair.twice_count)]


def _apart(one: float, other: float) -> float:
    """Relative to the larger."""
    return abs(one - other) / max(abs(one), abs(other), 1e-300)


def _is_same(one: Pair, other: Pair) -> bool:
    counts = (one.once_count, one.twice_count) == (other.once_count, other.twice_count)
    return counts and _apart(one.once, other.once) <= SAME and _apart(one.twice, other.twice) <= SAME


def _is_rounding(loss: float, count: float, *, narrow: bool = False) -> bool:
    """Whether numbers of size one would leave that much if they cancelled out."""
    kind = torch.bfloat16 if narrow else torch.float32
    return abs(loss) <= torch.finfo(kind).eps * count


def _seen(pair: Pair, samples: int) -> str:
    some, again = ("one sample", "that sample") if samples == 1 else (f"{samples} samples", "the same samples")
    counts = f" (count {pair.once_count:g})", f" (count {pair.twice_count:g})"
    first, second = counts if pair.once_count else ("", "")
    return (
        f"it is {pair.once:.6g}{first} for {some}, and {pair.twice:.6g}{second} for {again} twice over; "
        f"a sum would be {2 * pair.once:.6g}"
    )


# ---------------------------------------------------------------- what is said


def message(parts: Parts, finding: Finding, step: int) -> str:
    """The error: what is wrong, where, and the line to write."""
    meant = (
        "If it is meant so, say so: `loss_is_a_sum = False` in the task, or session.prepare(..., loss_is_a_sum=False) in a "
        "loop of your own"
    )
    where = f"step {step}: the loss ({_where(parts)})"
    if finding.kind == "mean":
        return (
            f"{where} is a mean, not a sum: {finding.said}. shardwise divides the sum by the count itself, so it would be "
            "divided twice.\n  Write\n      return Loss(sum=loss * count, count=count)\n"
            '  where count is the number of values that the mean is taken over, or compute the loss with reduction="sum"'
        )
    if finding.kind == "count":
        return (
            f"{where} has a count that does not grow with the samples: {finding.said}. Micro-batches of different sizes would "
            "weigh the same.\n  Write\n      return Loss(sum=loss * count, count=count)\n"
            "  where loss is a mean, and count the number of values that it is taken over (samples, tokens, voxels); without "
            f"`* count` where loss is a sum already. The task's count(batch) must say the same. {meant}"
        )
    return (
        f"{where} is not a sum over samples: {finding.said}.\n"
        "  Either a term of it is a mean: write term * count for that, where count is the number of values that it is taken over."
        "\n  Or a sample's loss depends on the other samples of its micro-batch, as a contrastive loss does. "
        f"{meant}"
    )


def _where(parts: Parts) -> str:
    """The function that computes it, as far as it can be told."""
    task = parts.task
    function = task.loss_function if isinstance(task, OwnTask) else task.loss
    name = getattr(function, "__qualname__", type(function).__name__)
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{name}, {Path(code.co_filename).name}:{code.co_firstlineno}" if code else name


# ---------------------------------------------------------------- the forward passes


class _NoAnswer(Exception):
    """The loss of these samples cannot be computed."""


class _Trial:
    def __init__(self, parts: Parts, data: Any, micro: MicroBatch, step: int) -> None:
        self.parts, self.step, self.request = parts, step, micro.request
        self.reader = Reader(data, parts.task.collate, parts.task.count, parts.config.seed)
        ids = micro.request.ids
        self.ids = ids[: max(1, len(ids) // 2)]
        self.whole = None if micro.request.borrowed else (len(ids), micro.count)

    @property
    def samples(self) -> int:
        return len(self.ids)

    def inputs(self, draws: range) -> tuple[list[tuple[Any, Any]], str]:
        """For each draw the samples once and twice over; or why they cannot be put together."""
        wanted = [
            # In another order every other time: it is rounded otherwise.
            Repeated(self.ids[:: -1 if draw % 2 else 1], times, self.request.epoch, draw)
            for draw in draws
            for times in (1, 2)
        ]
        try:
            read = read_beside(self.reader, wanted, self.parts.config.data)
        except (DataError, RuntimeError) as error:
            return [], f"samples cannot be put together twice over: {one_line(error)}"
        return list(zip(read[::2], read[1::2], strict=True)), ""

    def pair(self, once: Any, twice: Any, draw: int) -> Pair:
        losses, problem = [], ""
        for inputs in (once, twice):
            beat(Phase.COMPUTE, self.step)
            seed_everything(
                self.parts.config.seed, Purpose.STEP, self.step - 1, self.parts.strategy.layout.random_rank, 1 + draw
            )
            try:
                losses.append(self._loss(inputs))
            except _NoAnswer as error:  # the other forward pass is made all the same: other ranks make it too
                problem = str(error)
        if problem:
            raise _NoAnswer(problem)
        (first, first_count, narrow), (second, second_count, _) = losses
        return Pair(first, first_count, second, second_count, narrow)

    def _loss(self, inputs: Any) -> tuple[float, float, bool]:
        parts, strategy = self.parts, self.parts.strategy
        if parts.world.device.type == "cuda":
            inputs = MicroBatch(inputs, 0, self.request).to(parts.world.device).inputs
        with _Calls(strategy.alone) as calls:
            try:
                with torch.no_grad(), parts.precision.autocast():
                    loss = Loss(*strategy.ask(lambda model: _sum_and_count(parts.task.loss(model, inputs))))
                    return _number(loss.sum), _number(loss.count), self._is_narrow(loss)
            except Exception as error:
                # Ranks that wait for this one within the model would wait for ever, as in any other forward pass that fails.
                # (What shardwise itself refuses there, every rank refuses: a pipeline that cannot be evaluated, for example.)
                alone = not strategy.waits_for_others or calls.complete or isinstance(error, ShardwiseError)
                if not alone:
                    error.add_note(
                        f"This was a look at the loss before step {self.step}, without gradient and in evaluation mode, of "
                        "half a micro-batch: loss_is_a_sum = False in the task (or in session.prepare) leaves it out."
                    )
                    raise
                raise _NoAnswer(f"{type(error).__name__}: {one_line(error)}") from error

    def _is_narrow(self, loss: Loss) -> bool:
        kinds = {parameter.dtype for parameter in self.parts.parameters} | {loss.sum.dtype}
        return self.parts.config.training.precision in COMPUTE_TYPES or any(
            kind.is_floating_point and kind.itemsize < 4 for kind in kinds
        )


class _Calls:
    """Whether the model was called, and came to an end each time."""

    def __init__(self, model: nn.Module) -> None:
        self.begun = self.ended = 0
        self._hooks = [model.register_forward_pre_hook(self._begin), model.register_forward_hook(self._end)]

    def _begin(self, *_: Any) -> None:
        self.begun += 1

    def _end(self, *_: Any) -> None:
        self.ended += 1

    @property
    def complete(self) -> bool:
        return 0 < self.begun == self.ended

    def __enter__(self) -> _Calls:
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()


def _sum_and_count(loss: Loss) -> tuple[Any, Any]:
    return loss.sum, loss.count


def _number(value: Any) -> float:
    return float(value.full_tensor() if isinstance(value, DTensor) else value)


@contextmanager
def _nothing_kept(parts: Parts) -> Iterator[None]:
    """Forward passes in evaluation mode, after which modes, buffers and random states are as they were."""
    # The flags alone: a model's own train() and eval() may do anything, such as merge weights.
    own = [each for each in vars(parts.task).values() if isinstance(each, nn.Module)]
    modules = {id(module): module for root in (parts.strategy.model, *own) for module in root.modules()}.values()
    modes = [(module, module.training) for module in modules]
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in modules
        for name, buffer in buffers_of(module).items()
        if buffer is not None
    ]
    devices = list(range(torch.cuda.device_count())) if parts.world.device.type == "cuda" else []
    with torch.random.fork_rng(devices), generators_kept(), uncompiled(), parts.strategy.computing():
        try:
            for module in modules:
                module.training = False
            yield
        finally:
            for module, training in modes:
                module.training = training
            with torch.no_grad():
                for module, name, buffer, before in buffers:
                    buffers_of(module)[name] = buffer
                    if not _is_expanded(buffer):
                        buffer.copy_(before)


def _is_expanded(tensor: Tensor) -> bool:
    """One number stands for many: nothing can have been written to it in place."""
    strides = zip(tensor.shape, tensor.stride(), strict=True) if tensor.layout == torch.strided else ()
    return any(size > 1 and stride == 0 for size, stride in strides)
