"""The loss of a large vocabulary without its logits: head and cross entropy together, a few thousand tokens at a time.

The logits of 32,768 tokens over 32,000 words take 2 GB in bf16 and 4 GB in fp32, several times over. A chunk of them is
made, gives its loss and its gradient, and is thrown away: what stays are gradients of the size of the inputs.
"""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwise.kernels.types import computing_type

CHUNK = 4096
"""Tokens whose logits exist at a time."""


@torch.compiler.disable(reason="its kernel is compiled by itself, and the number of chunks changes")  # type: ignore[untyped-decorator]
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    chunk: int = CHUNK,
    group: dist.ProcessGroup | None = None,
    compiled: bool = False,
) -> Tensor:
    """The sum over all tokens of the cross entropy of `hidden @ weight.T + bias`: as `F.cross_entropy` gives it.

    `group`: its ranks have the words of the vocabulary in equal parts, in their order; `weight` is this rank's part.
    `compiled`: with one kernel that torch.compile makes. Gradients are computed on the way forward, so that no chunk is
    made twice.
    """
    if torch.is_autocast_enabled(hidden.device.type):
        narrow = computing_type(hidden)
        hidden, weight = hidden.to(narrow), weight.to(narrow)
        bias = None if bias is None else bias.to(narrow)
    wanted = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in (hidden, weight, bias)
    )
    flat = hidden.flatten(0, -2)
    if targets.numel() != len(flat):
        raise ValueError(f"{len(flat)} tokens, but {targets.numel()} targets")
    loss: Tensor = _Chunked.apply(flat, weight, bias, targets.flatten(), ignore_index, chunk, group, compiled, wanted)
    return loss


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        ignore_index: int,
        chunk: int,
        group: dist.ProcessGroup | None,
        compiled: bool,
        wanted: bool,
    ) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            total = torch.zeros((), dtype=torch.float32, device=hidden.device)
            to_hidden = torch.empty_like(hidden) if wanted else None
            # In fp32: the gradients of many chunks are added up.
            to_weight = torch.zeros_like(weight, dtype=torch.float32) if wanted else None
            to_bias = torch.zeros_like(bias, dtype=torch.float32) if wanted and bias is not None else None
            first = weight.shape[0] * (dist.get_rank(group) if group is not None else 0)
            pieces = max(1, -(-len(hidden) // chunk))
            edges = [len(hidden) * number // pieces for number in range(pieces + 1)]
            for start, end in itertools.pairwise(edges):
                rows = hidden[start:end]
                logits = torch.nn.functional.linear(rows, weight, bias)
                wide = targets[start:end]
                if compiled and group is None:
                    loss, gradient = _compiled()(logits, wide, ignore_index)
                else:
                    loss, gradient = loss_and_gradient(logits, wide, ignore_index, first, group)
                total += loss
                if to_hidden is None or to_weight is None:
                    continue
                torch.mm(gradient, weight, out=to_hidden[start:end])
                _add_product(to_weight, gradient.T, rows)
                if to_bias is not None:
                    to_bias += gradient.sum(dim=0, dtype=torch.float32)
            if group is not None and to_hidden is not None:
                dist.all_reduce(to_hidden, group=group)
            ctx.save_for_backward(to_hidden, to_weight, to_bias)
            ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        to_hidden, to_weight, to_bias = ctx.saved_tensors
        dtype = ctx.weight_dtype
        return (
            to_hidden.mul_(scale),
            to_weight.mul_(scale).to(dtype),
            None if to_bias is None else to_bias.mul_(scale).to(dtype),
            *[None] * 6,
        )


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, in fp32."""
    if left.is_cuda and left.dtype != torch.float32:  # matrix units add up in fp32: that is where it stays
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total += left @ right


def loss_and_gradient(
    logits: Tensor, targets: Tensor, ignore_index: int, first: int = 0, group: dist.ProcessGroup | None = None
) -> tuple[Tensor, Tensor]:
    """The summed loss of a chunk, and its gradient with respect to the logits, in their type. Where the ranks of a group have
    a part of the words each, this rank's begin with `first`, and the loss is the same on each of them."""
    wide = logits.float()
    counted = targets != ignore_index
    # Where all words are here, a target that is none of them is an error, which `gather` finds.
    mine = counted if group is None else counted & (targets >= first) & (targets < first + logits.shape[-1])
    chosen = torch.where(mine, targets - first, 0)
    highest = wide.amax(dim=-1)
    if group is not None:
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    powers = (wide - highest[:, None]).exp()
    of_target = torch.where(mine, wide.gather(-1, chosen[:, None]).squeeze(-1), 0.0)
    sums = torch.stack([powers.sum(dim=-1), of_target])
    if group is not None:
        dist.all_reduce(sums, group=group)
    losses = highest + sums[0].log() - sums[1]
    gradient = powers / sums[0][:, None]
    gradient[torch.arange(len(gradient), device=gradient.device), chosen] -= mine.float()
    return torch.where(counted, losses, 0.0).sum(), (gradient * counted[:, None]).to(logits.dtype)


def fused_loss_and_gradient(logits: Tensor, targets: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """The same, written so that it becomes one kernel which reads the logits twice and writes the gradient once."""
    wide = logits.float()
    counted = targets != ignore_index
    chosen = torch.where(counted, targets, 0)
    highest = wide.amax(dim=-1, keepdim=True)
    powers = (wide - highest).exp()
    summed = powers.sum(dim=-1, keepdim=True)
    of_target = wide.gather(-1, chosen[:, None])
    losses = (highest + summed.log() - of_target).squeeze(-1)
    hit = torch.arange(logits.shape[-1], device=logits.device)[None] == chosen[:, None]
    gradient = (powers / summed - hit.float()) * counted[:, None]
    return torch.where(counted, losses, 0.0).sum(), gradient.to(logits.dtype)


@cache
def _compiled() -> Any:
    """For any number of tokens."""
    return torch.compile(fused_loss_and_gradient, dynamic=True)
