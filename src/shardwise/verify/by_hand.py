"""Samples to gradients, by hand: nothing here goes through the engine. And what a pass over samples leaves behind."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.compat.modules import BatchNorm
from shardwise.config.seeds import Purpose
from shardwise.data import Reader
from shardwise.data.loader import _map_tensors
from shardwise.data.order import Indices
from shardwise.data.seeding import seed_everything
from shardwise.engine.precision import Precision
from shardwise.engine.run import Run
from shardwise.parallel.gather import Scope, gathering
from shardwise.parallel.parameter_marks import ParameterMarks
from shardwise.tasks import Task
from shardwise.verify.contents import contents_of, first_difference
from shardwise.verify.names import canonical
from shardwise.verify.plain_state import PlainState, attributes_of

Gradients = dict[str, Tensor]
SPLIT_MATTERS = 1e-4
"""A gradient that moves by more, computed in micro-batches instead of at once, does not do so by rounding."""
RANDOM = 1e-5
"""A gradient that moves by more, computed again on the same weights and samples, is not a function of them."""
MOST_BUFFERS = 16
"""Buffers that are looked at one by one."""
LONGEST = 20.0
"""Seconds for looking at further samples, for those that train a parameter."""


@dataclass
class Found:
    loss: float
    count: int
    gradients: Gradients
    changed: list[str]
    """Buffers that the forward pass changed. They are put back."""


@dataclass(frozen=True)
class History:
    """What a forward pass leaves behind, and what that does to the next ones."""

    changed: list[str]
    """Besides buffers, which are put back: attributes, variables, parameters, modules."""
    matters: float
    """How far the gradient of a batch moves with what was computed before it, on the same weights and with the same seeds."""
    losses: list[float]
    """Of every pass, in order."""
    by_samples: list[str]
    """Parameters that a pass changes by itself, to values that follow from its samples."""
    by_chance: bool = False
    """Another process that makes the same passes has other losses: then it is no history."""


class ByHand:
    """Samples to gradients, by hand."""

    def __init__(self, run: Run, model: nn.Module, precision: str) -> None:
        self.task: Task = run.task
        self.model = model
        self.run = run
        self.precision = Precision(precision, run.world.device.type)
        self.reader = Reader(run.train_data, self.task.collate, self.task.count, run.config.seed)
        self.scope = Scope(run.strategy.layout, alone=True)

    def read(self, ids: Indices) -> Any:
        return _map_tensors(self.reader.micro_batch(ids), lambda tensor: tensor.to(self.run.world.device))

    def gradient(self, ids: Indices, seed: int = 0, *, inputs: Any = None, moved: Sequence[str] = ()) -> Found:
        """`inputs`: the batch, where it has been read already. `moved`: buffers that have another value meanwhile."""
        inputs = self.read(ids) if inputs is None else _map_tensors(inputs, Tensor.clone)
        self.model.zero_grad(set_to_none=True)
        before = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        with torch.no_grad():
            generator = torch.Generator().manual_seed(0)
            for name in moved:  # unevenly: a norm may take away what is the same everywhere
                buffer = self.model.get_buffer(name)
                if buffer.is_floating_point():
                    buffer.mul_(1.1).add_(0.1 * torch.rand(buffer.shape, generator=generator).to(buffer))
                elif buffer.dtype == torch.bool:
                    buffer.logical_not_()
                else:
                    buffer.add_(1)
        seed_everything(self.run.config.seed, Purpose.STEP, seed, 0)
        with self.precision.autocast(), gathering(self.scope):
            loss = self.task.loss(self.model, inputs)
        # Divided here and multiplied below: gradients of a sum may be too large for fp16.
        count = max(1, int(loss.count))
        (loss.sum / count).backward()
        named = self.model.named_parameters()
        gradients = {
            canonical(name): each.grad.detach().float().cpu() * count for name, each in named if each.grad is not None
        }
        return Found(float(loss.sum.detach()), count, gradients, self._put_back(before))

    def _put_back(self, before: dict[str, Tensor]) -> list[str]:
        changed = []
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                if name in before and before[name].shape == buffer.shape and not torch.equal(before[name], buffer):
                    buffer.copy_(before[name])
                    changed.append(name)
        return changed

    def read_again(self, ids: Indices) -> tuple[str, float]:
        """Where samples are not the same when they are read twice, and how far that moves the gradient."""
        once, twice = self.read(ids), self.read(ids)
        place = first_difference(contents_of(once), contents_of(twice))
        if place is None:
            return "", 0.0
        gap = _apart(self.gradient(ids, inputs=once).gradients, self.gradient(ids, inputs=twice).gradients)
        for index in ids[:100]:
            alone = ids[ids == index][:1]
            if found := first_difference(contents_of(self.read(alone)), contents_of(self.read(alone))):
                return f"sample {index}: {found}", gap
        return f"the batch of samples {ids[0]}, {ids[-1]} and others, though each alone is the same: {place}", gap

    def drawn(self, ids: Indices) -> bool:
        seeded = Reader(self.run.train_data, self.task.collate, self.task.count, self.run.config.seed + 1)
        return contents_of(seeded.micro_batch(ids)) != contents_of(self.reader.micro_batch(ids))

    def never_trained(self, names: Sequence[str], ids: Indices, at_once: int) -> tuple[list[str], list[str], int]:
        """Those of the parameters that get a gradient from none of these samples; those among them whose module was called; and
        how many samples were tried."""
        lacking, tried, began = set(names), 0, time.monotonic()
        called: set[str] = set()
        owners = [
            (canonical(f"{path}.{leaf}" if path else leaf), module)
            for path, module in self.model.named_modules()
            for leaf, _ in module.named_parameters(recurse=False)
        ]
        hooks = [
            owner.register_forward_pre_hook(lambda *_, of=name: called.add(of))
            for name, owner in owners
            if name in lacking
        ]
        while lacking and tried < len(ids) and time.monotonic() - began < LONGEST:
            some = ids[tried : tried + at_once]
            lacking -= self.gradient(some).gradients.keys()
            tried += len(some)
        for hook in hooks:
            hook.remove()
        never = [name for name in names if name in lacking]
        return never, [name for name in never if name in called], tried

    def gathers_in(self, ids: Indices, at_once: int) -> bool:
        """Whether the loss of any of these samples looks at the rows of other ranks."""
        for begin in range(0, len(ids), at_once):
            self.gradient(ids[begin : begin + at_once])
            if self.scope.used:
                return True
        return False

    def randomness(self, ids: Indices) -> float:
        inputs = self.read(ids)
        first, second = (self.gradient(ids, seed, inputs=inputs) for seed in (1, 2))
        return _apart(first.gradients, second.gradients)

    def hidden_state(self, parts: Sequence[Indices]) -> History:
        """Afterwards the model is as it was built."""
        first, others = parts[0], parts[1:]
        try:
            built = copied_model(self.model)
        except Exception:  # something in it cannot be copied
            return History([], 0.0, [], [])
        plain = PlainState(self.task, {type(each) for each in built.modules()})

        def start_over() -> None:
            self.model = copied_model(built)
            plain.put_back()

        once = self.gradient(first)
        changed = _changed(built, self.model) + plain.changed()
        by_samples, passed = [], self.model
        start_over()
        if others and _other_weights(built, passed):
            self.gradient(others[0])
            by_samples = _other_weights(passed, self.model)
            start_over()
        later = [self.gradient(part) for part in [*others, first, *others, first]]
        gap = _apart(later[-1].gradients, once.gradients)
        start_over()
        if changed and gap > RANDOM and _apart(self.gradient(first).gradients, once.gradients) > RANDOM:
            changed = []  # with all of that put back it is another all the same
        start_over()
        return History(changed, gap, [each.loss for each in (once, *later)], by_samples)

    def moving_buffers(self, ids: Indices) -> list[str]:
        """Those that a training forward changes: an average of the weights, too, which stands still until these have moved."""
        moved = copy.copy(self)
        try:
            moved.model = copied_model(self.model)
        except Exception:  # something in it cannot be copied
            return self.gradient(ids).changed
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for each in moved.model.parameters():
                if each.is_floating_point():
                    each.mul_(1 + 0.02 * (torch.rand(each.shape, generator=generator) - 0.5).to(each))
        return list(dict.fromkeys(self.gradient(ids).changed + moved.gradient(ids).changed))

    def buffers_in_gradient(self, ids: Indices, names: Sequence[str]) -> list[str]:
        """Of buffers that change in training, those that decide about the gradient: running statistics do not."""
        if not names:
            return []
        inputs = self.read(ids)
        expected = self.gradient(ids, inputs=inputs).gradients

        def matter(moved: Sequence[str]) -> bool:
            gap = _apart(self.gradient(ids, inputs=inputs, moved=moved).gradients, expected)
            return not gap <= RANDOM  # NaN, too

        if not matter(names):
            return []
        return [canonical(name) for name in names[:MOST_BUFFERS] if matter([name])] or [canonical(names[0])]

    def split_matters(self, ids: Indices, parts: list[Indices]) -> float:
        whole = self.gradient(ids).gradients
        total = {name: torch.zeros_like(each) for name, each in whole.items()}
        for part in parts:
            for name, each in self.gradient(part).gradients.items():
                if name in total:
                    total[name] += each
        # A loss that divides by something of its own has another count too.
        counts = self.gradient(ids).count / max(1, sum(self.gradient(part).count for part in parts))
        return _apart({name: each * counts for name, each in total.items()}, whole)

    def hooks_that_matter(self, ids: Indices, parts: list[Indices]) -> list[str]:
        """Parameters with hooks of their gradients, if without these it does not matter that the batch is split."""
        hooked = ParameterMarks(self.model).hooked
        if not hooked:
            return []
        other = copy.copy(self)
        other.model = copy.deepcopy(self.model)  # which leaves them behind
        return hooked if other.split_matters(ids, parts) <= SPLIT_MATTERS else []

    def in_double(self, ids: Indices) -> Gradients:
        """What the gradient would be without rounding; empty where something in it is not made for that."""
        other = copy.copy(self)
        try:
            other.model = copied_model(self.model).double()
            other.precision = Precision("32-true", self.run.world.device.type)
            inputs = _map_tensors(self.read(ids), lambda each: each.double() if each.is_floating_point() else each)
            found = other.gradient(ids, inputs=inputs)
        except Exception:
            return {}
        return {name: each / found.count for name, each in found.gradients.items()}

    def frozen(self) -> ByHand:
        """Batch norm uses its running statistics: no sample knows of another any more."""
        other = copy.copy(self)
        other.model = copied_model(self.model)
        for module in other.model.modules():
            if isinstance(module, BatchNorm):
                module.eval()
        return other


def copied_model(model: nn.Module) -> nn.Module:
    """With the hooks and attributes of its parameters, which deepcopy leaves behind."""
    copied = copy.deepcopy(model)
    ParameterMarks(model).put_on(copied)
    return copied


def _changed(before: nn.Module, after: nn.Module) -> list[str]:
    """Of two copies of one model, the second of which has computed something."""
    was, now = attributes_of(before), attributes_of(after)
    modules = {name for name, _ in before.named_modules()}
    return [
        *(f"module {name} (new)" for name, _ in after.named_modules() if name not in modules),
        *(f"parameter {name}" for name in _other_weights(before, after)),
        *(name for name in now if was.get(name) != now[name]),
    ]


def _other_weights(before: nn.Module, after: nn.Module) -> list[str]:
    """Parameters that have another value in the second of two copies, by name."""
    was = dict(before.named_parameters())
    return [
        name
        for name, each in after.named_parameters()
        if name not in was or each.shape != was[name].shape or not torch.equal(each, was[name])
    ]


def _apart(one: Gradients, other: Gradients) -> float:
    """The 2-norm of the difference over that of the second. What has no gradient in one of them has none of zeros there."""
    size = torch.stack([each.norm() for each in other.values()]).norm()
    more = [each for name, each in one.items() if name not in other]
    gaps = [*(one[name] - each if name in one else each for name, each in other.items()), *more]
    gap = torch.stack([each.norm() for each in gaps]).norm()
    return float(gap / size) if size else math.inf if gap else 0.0
