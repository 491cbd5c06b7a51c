"""The rows of all ranks' micro-batches together: for a loss that looks at the whole batch at once, as contrastive ones do.

Forward, the rows of every rank reach every rank. Backward, what all ranks' losses say of a row is added up, on the rank that
it came from. The engine says where a step is (`gathering`): which ranks take part, and whether this one has samples of its own.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.compat.distributed import reduce_scatter
from shardwise.errors import ShardwiseError
from shardwise.parallel.layout import Layout
from shardwise.parallel.object_collectives import gather_plain


class Gathered(NamedTuple):
    """What `gather_batch` gives."""

    rows: Tensor
    """Of all ranks, in the order that the samples have in the global batch."""
    own: slice
    """Where this rank's rows are among them."""


# Dynamo cannot look into collectives of other devices: a compiled block is split here.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def gather_batch(tensor: Tensor) -> Gathered:
    """The rows (along the first axis) of all ranks' micro-batches, and which of them are this rank's. Gradients flow back
    through it to the rank that a row came from. Ranks may have different numbers of rows, or none.

    To be called by a task's `loss` or `evaluate`, or by its model, on every rank equally often.
    """
    if isinstance(tensor, DTensor):
        raise ShardwiseError("gather_batch takes plain tensors: call .full_tensor() or .to_local() on a DTensor first")
    if not tensor.ndim:
        raise ShardwiseError("gather_batch takes rows, and a single number has none: give it number[None]")
    scope = _Current.scope
    if scope is None:
        if dist.is_initialized() and dist.get_world_size() > 1:
            raise ShardwiseError(
                "gather_batch was called outside of a step: only the task's loss() and evaluate(), and the model within them, "
                "can know that every rank calls it"
            )
        return _alone(tensor, 1)
    scope.check()
    scope.used = True
    return _alone(tensor, scope.copies) if scope.alone or scope.copies == 1 else _over_ranks(tensor, scope)


@dataclass
class Scope:
    """One step, or one evaluation."""

    layout: Layout
    micro_batches: int = 1
    """Of a rank, per step."""
    alone: bool = False
    """This rank tries something out without the others: it stands for all of them."""
    cuts_rows: bool = False
    """One process gives parts of a micro-batch to several devices, each in a thread of its own."""
    borrowed: bool = False
    """This rank has no sample of its own in the micro-batch that is computed: its rows count nothing, and no other sees them."""
    thread: int = field(default_factory=threading.get_ident)
    used: bool = False
    """Something has been gathered."""

    @property
    def copies(self) -> int:
        return self.layout.data_size

    def check(self) -> None:
        if self.layout.size("stage") > 1:
            raise ShardwiseError(
                "gather_batch does not go with strategy pipeline: it computes a batch in several micro-batches, one after the "
                "other, so that no loss sees them all. Use strategy: ddp or fsdp"
            )
        if self.micro_batches > 1:
            raise ShardwiseError(accumulation_problem(self.micro_batches))
        if self.cuts_rows and threading.get_ident() != self.thread:
            raise ShardwiseError(
                "gather_batch does not work in a model under strategy dp, which gives each device a part of the batch: use ddp"
            )


def accumulation_problem(micro_batches: int) -> str:
    return (
        f"gather_batch does not go with gradient accumulation, here over {micro_batches} micro-batches: they are computed one "
        "after the other, and a loss would see one of each rank instead of the whole batch. Set "
        "training.gradient_accumulation: 1, with a larger training.batch_size or more ranks"
    )


class _Current:
    """Of this process, not of a thread: what is computed again in the backward pass runs in threads of autograd's own."""

    scope: Scope | None = None


@contextmanager
def gathering(scope: Scope) -> Iterator[Scope]:
    """In here `gather_batch` knows what to do."""
    before, _Current.scope = _Current.scope, scope
    try:
        yield scope
    finally:
        _Current.scope = before


def _alone(tensor: Tensor, copies: int) -> Gathered:
    """`copies`: as many ranks with the same rows are played, so that what follows takes the memory that it will take."""
    return Gathered(
        tensor if copies == 1 else tensor.repeat(copies, *(1 for _ in tensor.shape[1:])), slice(0, len(tensor))
    )


def _over_ranks(tensor: Tensor, scope: Scope) -> Gathered:
    layout = scope.layout
    sizes = _sizes(tensor, scope)
    rows: Tensor = _Gather.apply(tensor, sizes, layout, scope.borrowed)
    begin = sum(sizes) if scope.borrowed else sum(sizes[: layout.data_rank])
    return Gathered(rows, slice(begin, begin + len(tensor)))


def _sizes(tensor: Tensor, scope: Scope) -> list[int]:
    """How many rows each rank brings. Asked over the host's connections, where nobody waits for a GPU."""
    world, kind = scope.layout.world, _kind(tensor)
    told = torch.tensor([0 if scope.borrowed else len(tensor), zlib.crc32(kind.encode())])
    everyone = [torch.empty_like(told) for _ in range(world.size)]
    dist.all_gather(everyone, told, group=world.group)
    if len({int(each[1]) for each in everyone}) > 1:
        kinds = ", ".join(f"rank {rank} {each}" for rank, each in enumerate(gather_plain(kind, world.group)))
        raise ShardwiseError(f"gather_batch got rows that do not fit together: {kinds}")
    # Of the ranks that work on the same samples, one speaks for all.
    return [int(each[0]) for each in everyone[:: scope.layout.size("tensor")]]


def _kind(tensor: Tensor) -> str:
    needs = ", with gradient" if tensor.requires_grad and torch.is_grad_enabled() else ", without gradient"
    return f"{str(tensor.dtype).removeprefix('torch.')} [n, {', '.join(map(str, tensor.shape[1:]))}]{needs}"


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, sizes: list[int], layout: Layout, borrowed: bool) -> Tensor:
        ctx.sizes, ctx.layout, ctx.borrowed, ctx.own = sizes, layout, borrowed, len(tensor)
        mine = tensor[:0] if borrowed else tensor
        parts = _gathered(mine, sizes, layout) if max(sizes) else []
        return torch.cat([*parts, tensor]) if borrowed or not parts else torch.cat(parts)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        sizes, layout = ctx.sizes, ctx.layout
        theirs, tail = grad.split([sum(sizes), len(grad) - sum(sizes)])
        mine = _summed(theirs, sizes, layout) if max(sizes) else theirs
        return tail if ctx.borrowed else mine, None, None, None


def _gathered(mine: Tensor, sizes: Sequence[int], layout: Layout) -> list[Tensor]:
    """As bytes, which every backend can carry, whatever the type of the rows; all of one length."""
    longest = max(sizes)
    padded = mine.new_zeros((longest, *mine.shape[1:]))
    padded[: len(mine)] = mine
    flat = padded.reshape(-1)
    if not flat.numel():
        return [mine.new_zeros((size, *mine.shape[1:])) for size in sizes]
    sent = flat.view(torch.uint8)
    arrived = [torch.empty_like(sent) for _ in sizes]
    dist.all_gather(arrived, sent, group=layout.data_group)
    return [each.view(mine.dtype).view(padded.shape)[:size] for each, size in zip(arrived, sizes, strict=True)]


def _summed(grad: Tensor, sizes: Sequence[int], layout: Layout) -> Tensor:
    """Each rank gets the sum of what all have for its rows. Narrow types are added up in fp32."""
    kind = torch.promote_types(grad.dtype, torch.float32)
    padded = grad.new_zeros((len(sizes), max(sizes), *grad.shape[1:]), dtype=kind)
    for rank, (begin, size) in enumerate(zip(accumulate(sizes, initial=0), sizes, strict=False)):
        padded[rank, :size] = grad[begin : begin + size]
    if not padded.numel():
        return grad[: sizes[layout.data_rank]]
    real = torch.view_as_real(padded) if padded.is_complex() else padded
    own = torch.empty_like(real[0])
    reduce_scatter(own, real.flatten(0, 1), layout.data_group)
    summed = torch.view_as_complex(own) if padded.is_complex() else own
    return summed[: sizes[layout.data_rank]].to(grad.dtype)
