"""What one process finds out before any rank starts: the plan, the gradients of the first batch in plain PyTorch, and
experiments that tell causes apart.

Nothing here goes through the engine: the model is built by the task, the loss divided by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from shardwise.compat.modules import BatchNorm
from shardwise.config import Batching, Config
from shardwise.data import shares
from shardwise.engine.parallel_init import build_initial_model
from shardwise.engine.run import Run
from shardwise.engine.user_task import OwnTask
from shardwise.verify.by_hand import SPLIT_MATTERS, ByHand, Gradients, History, copied_model
from shardwise.verify.contents import contents_of, digests
from shardwise.verify.dropout import switch_off_in
from shardwise.verify.names import canonical, tied_names
from shardwise.verify.own_data import look_at
from shardwise.verify.run_spec import Plan, RunSpec, as_asked, batching_of
from shardwise.verify.window import Window

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
    first = ByHand(run, model, config.training.precision)
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
    plain = ByHand(run, model, "32-true" if config.training.precision != "bf16-true" else "bf16-true")
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
        model = copied_model(run.strategy.module)
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
