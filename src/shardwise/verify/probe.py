"""What one process finds out before any rank starts: the plan, the gradients of the first batch in plain PyTorch, and
experiments that tell causes apart.

Nothing here goes through the engine: the model is built by the task, the loss divided by hand.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shardwise.compat.modules import BatchNorm
from shardwise.config import Batching, Config
from shardwise.config.seeds import Purpose
from shardwise.data import Reader, shares
from shardwise.data.loader import _map_tensors
from shardwise.data.order import Indices
from shardwise.data.seeding import seed_everything
from shardwise.engine.parallel_init import build_initial_model
from shardwise.engine.precision import Precision
from shardwise.engine.run import Run
from shardwise.engine.user_task import OwnTask
from shardwise.parallel.gather import Scope, gathering
from shardwise.parallel.parameter_marks import ParameterMarks
from shardwise.tasks import Task
from shardwise.verify.contents import contents_of, digests, first_difference
from shardwise.verify.dropout import switch_off_in
from shardwise.verify.names import canonical, tied_names
from shardwise.verify.own_data import look_at
from shardwise.verify.plain_state import PlainState, attributes_of
from shardwise.verify.run_spec import Plan, RunSpec, as_asked, batching_of
from shardwise.verify.window import Window

Gradients = dict[str, Tensor]
SPLIT_MATTERS = 1e-4
"""A gradient that moves by more, computed in micro-batches instead of at once, does not do so by rounding."""
RANDOM = 1e-5
"""A gradient that moves by more, computed again on the same weights and samples, is not a function of them."""
MOST_BUFFERS = 16
"""Buffers that are looked at one by one."""
LONGEST = 20.0
"""Seconds for looking at further samples, for those that train a parameter."""
MOST_ELEMENTS = 100_000_000
"""Gradients of single micro-batches are kept up to this many numbers in all."""


@dataclass
class Share:
    """One micro-batch of one rank: the gradient of its summed loss, and what it counts."""

    rank: int
    micro: int
    samples: int
    count: int
    gradients: Gradients


@dataclass
class Probe:
    plan: Plan
    precision: str
    samples: int
    held_out: int
    parameters: int
    loss: float
    count: int
    norm: float
    gradients: Gradients
    """Of the first global batch: the loss of all its samples at once, divided by what they count."""
    exact: Gradients
    """The same in double precision; empty where the model does not allow it."""
    shares: list[Share]
    ids: list[int]
    """The samples of the first batch, by the order itself."""
    initial: dict[str, str]
    tied: list[list[str]]
    without_gradient: list[str]
    """Trainable parameters that get none in the first batch."""
    may_lack_gradients: bool
    batch_norm: bool
    inputs: dict[tuple[int, ...], dict[str, str]]
    """What these samples are, put together, by fingerprints: the whole batch, and the micro-batches of the ranks."""
    unlike: str
    """Where the same samples, read again, are other ones; empty where they are not."""
    random_data: float
    """How far the gradient moves when the batch is read again."""
    random_forward: float
    """How far the gradient moves when nothing but the seed is changed, on a batch that is read once."""
    drawn: bool
    """The same samples are others with another seed: something in reading them is drawn."""
    history: History
    buffers_in_gradient: list[str]
    """Buffers that a training forward changes and that the gradient depends on."""
    split_matters: float
    """How far the gradient moves when the batch is computed in micro-batches."""
    split_matters_without_batch_norm: float
    split_matters_by_hooks: list[str]
    """Parameters whose hooks are all there is to that; none where it is something else."""
    data: dict[str, Any]
    """How many samples there are, and what is in some of them."""
    clip_said: str = ""
    comm_hook: str = "none"
    never_trained: Sequence[str] = ()
    """Those that get none in any of the samples that were tried for it."""
    tried: int = 0
    """How many these are."""
    detached: Sequence[str] = ()
    """Those of them whose module computed all the same: others are in modules that no sample came to."""

    @property
    def by_batch_norm(self) -> bool:
        """Splitting the batch changes the gradient, and batch norm is all there is to it."""
        return self.split_matters > SPLIT_MATTERS >= self.split_matters_without_batch_norm


def probe(run: Run, asked: Config, spec: RunSpec) -> Probe:
    """`asked`: the config as the user wrote it."""
    config = as_asked(asked, spec.strategy)
    batching = batching_of(config, spec.ranks)
    model = _model(run)
    initial = digests({canonical(name): each.detach() for name, each in model.named_parameters()})
    has_batch_norm = any(isinstance(module, BatchNorm) for module in model.modules())
    window, start = _window(len(run.train_data), batching, cautious=has_batch_norm)
    order = Window(run.order(), window)
    ids = order.part(0, start, window)
    first = _Batch(run, model, config.training.precision)
    history = first.hidden_state([part for part in np.array_split(ids, 3) if len(part)])
    model = first.model

    whole = first.gradient(ids)
    gradients = {name: each / whole.count for name, each in whole.gradients.items()}
    norm = float(torch.stack([each.float().norm() for each in gradients.values()]).norm())
    clip, said = _clip(config.training.gradient_clip, norm)
    pieces = [
        (rank, micro, part)
        for rank in range(batching.world)
        for micro, part in enumerate(shares(ids, batching, rank))
        if len(part)
    ]
    elements = sum(each.numel() for each in gradients.values())
    named = ((canonical(name), each) for name, each in model.named_parameters() if each.requires_grad)
    trainable = [name for name, _ in named if name in initial]  # a forward pass may have made others
    plain = _Batch(run, model, "32-true" if config.training.precision != "bf16-true" else "bf16-true")
    split = plain.split_matters(ids, [part for _, _, part in pieces])
    unlike, random_data = first.read_again(ids)
    gathers = first.scope.used or (not run.task.loss_is_a_sum and first.gathers_in(order.part(0, 0, window), len(ids)))
    found = Probe(
        plan=Plan(batching, window, start, clip, gathers),
        precision=config.training.precision,
        samples=len(run.train_data),
        held_out=0 if run.valid_data is None else len(run.valid_data),
        parameters=sum(each.numel() for each in model.parameters()),
        loss=whole.loss / whole.count,
        count=whole.count,
        norm=norm,
        gradients=gradients,
        exact={},
        shares=[
            Share(rank, micro, len(part), found.count, found.gradients)
            for rank, micro, part in pieces
            for found in [first.gradient(part)]
        ]
        if elements * len(pieces) <= MOST_ELEMENTS
        else [],
        ids=sorted(ids.tolist()),
        initial=initial,
        tied=tied_names(model),
        without_gradient=[name for name in trainable if name not in gradients],
        may_lack_gradients=config.training.ddp.find_unused_parameters,
        batch_norm=has_batch_norm,
        inputs={
            tuple(part.tolist()): contents_of(first.read(part)) for part in (ids, *(each for _, _, each in pieces))
        },
        unlike=unlike,
        random_data=random_data,
        random_forward=first.randomness(ids),
        drawn=first.drawn(ids),
        history=history,
        buffers_in_gradient=plain.buffers_in_gradient(ids, plain.moving_buffers(ids)),
        split_matters=split,
        split_matters_without_batch_norm=plain.frozen().split_matters(ids, [part for _, _, part in pieces])
        if has_batch_norm and split > SPLIT_MATTERS
        else split,
        split_matters_by_hooks=plain.hooks_that_matter(ids, [part for _, _, part in pieces])
        if split > SPLIT_MATTERS
        else [],
        data=look_at(run, run.task, run.train_data, run.valid_data, 0, few=True),
        clip_said=said,
        comm_hook=config.training.ddp.comm_hook,
    )
    if found.without_gradient:
        everything = run.order().part(0, 0, len(run.train_data))
        found.never_trained, found.detached, found.tried = first.never_trained(
            found.without_gradient, everything, len(ids)
        )
    if elements <= MOST_ELEMENTS:  # last: numbers of double precision may stay in what a hook or a closure keeps
        found.exact = plain.in_double(ids)
    return found


def _model(run: Run) -> nn.Module:
    """As the task builds it, with the seed of the weights; a program's own, as the session found it."""
    if isinstance(run.task, OwnTask):
        model = _copied(run.strategy.module)
    else:
        model = build_initial_model(run.task, run.config.seed)
        if run.config.training.precision == "bf16-true":
            for parameter in model.parameters():
                parameter.data = parameter.data.bfloat16() if parameter.is_floating_point() else parameter.data
    switch_off_in(model)
    return model.to(run.world.device).train()


def _window(samples: int, batching: Batching, *, cautious: bool) -> tuple[int, int]:
    """How many samples an epoch has, and where the first one begins.

    The first step is ragged: ranks and micro-batches of different sizes. Then come epochs of two full batches and a
    last one with fewer samples than ranks. Batch norm cannot take a single sample, so it gets two per rank.
    """
    whole = batching.global_batch
    ragged = max(1, whole - batching.world * -(-batching.batch_size // 2) + 1)
    last = 2 * batching.world + 1 if cautious else max(1, batching.world - 1)
    window = min(samples, 2 * whole + min(last, whole - 1 or 1))
    return window, max(0, window - ragged)


def _clip(said: float | None, norm: float) -> tuple[float, str]:
    if said is not None and said < 0.8 * norm:
        return said, ""
    limit = float(f"{0.5 * norm:.2g}") or 1.0
    was = "the config has no gradient_clip" if said is None else f"gradient_clip {said:g} is above the gradient's norm"
    return limit, f"{was} ({norm:.3g} at step 1), so {limit:g} is used"


@dataclass
class _Found:
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


class _Batch:
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

    def gradient(self, ids: Indices, seed: int = 0, *, inputs: Any = None, moved: Sequence[str] = ()) -> _Found:
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
        return _Found(float(loss.sum.detach()), count, gradients, self._put_back(before))

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
            built = _copied(self.model)
        except Exception:  # something in it cannot be copied
            return History([], 0.0, [], [])
        plain = PlainState(self.task, {type(each) for each in built.modules()})

        def start_over() -> None:
            self.model = _copied(built)
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
            moved.model = _copied(self.model)
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
            other.model = _copied(self.model).double()
            other.precision = Precision("32-true", self.run.world.device.type)
            inputs = _map_tensors(self.read(ids), lambda each: each.double() if each.is_floating_point() else each)
            found = other.gradient(ids, inputs=inputs)
        except Exception:
            return {}
        return {name: each / found.count for name, each in found.gradients.items()}

    def frozen(self) -> _Batch:
        """Batch norm uses its running statistics: no sample knows of another any more."""
        other = copy.copy(self)
        other.model = _copied(self.model)
        for module in other.model.modules():
            if isinstance(module, BatchNorm):
                module.eval()
        return other


def _copied(model: nn.Module) -> nn.Module:
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
