"""AdamW of large matrices in one pass, from the gradients of low-precision copies.

PyTorch's fused AdamW wants gradients in the type of the weights, so those of low-precision copies are cast first, and written
once more when they are clipped. Here each number is read once and written once: 26 bytes per weight instead of 38 and six.
State, names and checkpoints are AdamW's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.compat.compiler import compile_errors
from shardwise.compat.tensors import foreach_add_
from shardwise.errors import one_line
from shardwise.kernels.low_precision_weights import LowPrecisionWeights

LARGE = 2**22
"""Numbers in a matrix from which on it pays: smaller ones are updated many at a time by PyTorch's own."""

log = logging.getLogger(__name__)


class LowPrecisionAdamW(torch.optim.AdamW):
    """`copies` are given after the state is made; until then, and for small weights, it is PyTorch's."""

    copies: LowPrecisionWeights | None = None
    compiled = True
    grad_scale: Tensor | None = None
    """What gradients are divided by."""
    found_inf: Tensor | None = None
    """1 where nothing is to be updated, else 0."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.copies is None:
            super().step(closure)
            return
        large = [(group, weight) for group in self.param_groups for weight in group["params"] if self._is_large(weight)]
        gradients = {weight: self.copies.gradient_of(weight) for _, weight in large}
        chosen = [(group, weight) for group, weight in large if gradients[weight] is not None]
        kept = {weight: weight.grad for _, weight in chosen}
        self.copies.collect(without=kept.keys())
        for weight in kept:  # hidden from PyTorch's
            weight.grad = None
        super().step()
        if not chosen:
            return
        device = chosen[0][1].device
        found = self.found_inf if self.found_inf is not None else torch.zeros((), device=device)
        scale = self.grad_scale if self.grad_scale is not None else torch.ones((), device=device)
        for group in self.param_groups:
            weights = [weight for of, weight in chosen if of is group]
            if not weights:
                continue
            steps = [self.state[weight]["step"] for weight in weights]
            foreach_add_(steps, [1 - found] * len(steps))
            for weight, numbers in zip(weights, _numbers(group, torch.stack(steps), scale, found), strict=True):
                state, gradient = self.state[weight], gradients[weight]
                assert gradient is not None
                flat = [each.view(-1) for each in (weight, gradient, state["exp_avg"], state["exp_avg_sq"])]
                self._run(*flat, numbers, *group["betas"], group["eps"])
                weight.grad = kept[weight]

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        if self.copies is not None:
            self.copies.drop()

    def _is_large(self, weight: nn.Parameter) -> bool:
        assert self.copies is not None
        return weight.numel() >= LARGE and weight.is_contiguous() and self.copies.has(weight)

    def _run(self, *given: Any) -> None:
        if self.compiled:
            try:
                _compiled()(*given)
                return
            except compile_errors() as error:
                log.warning(f"the update does not compile, and runs as it is: {one_line(error)}")
                self.compiled = False
        update(*given)


def _numbers(group: dict[str, Any], steps: Tensor, scale: Tensor, found: Tensor) -> Sequence[Tensor]:
    """What an update needs besides its tensors, for each weight: made for all at once, and never looked at by the host."""
    rate, (first, second) = float(group["lr"]), group["betas"]
    kept = torch.full_like(steps, 1 - rate * group["weight_decay"])
    rates, roots = rate / (1 - first**steps), (1 - second**steps).sqrt()
    columns = [rates, roots, kept, scale.expand_as(steps), found.expand_as(steps)]
    # Filled up, so that every row begins at a multiple of 32 bytes, as compiled code likes it.
    return torch.stack([*columns, *[kept] * (8 - len(columns))], dim=1).unbind()


def update(
    weight: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    numbers: Tensor,
    first: float,
    second: float,
    eps: float,
) -> None:
    """As PyTorch's fused AdamW, in place. `numbers`: the rate, corrected for a mean that began at 0; the root of the square's
    correction; what decay leaves of a weight; what the gradient is divided by; and, where it is not 0, everything stays."""
    rate, root, kept, scale, found = numbers[0], numbers[1], numbers[2], numbers[3], numbers[4]
    stays = found != 0
    true = gradient.float() / scale
    next_mean = mean + (true - mean) * (1 - first)
    next_square = square * second + true * true * (1 - second)
    next_weight = weight * kept - rate * next_mean / (next_square.sqrt() / root + eps)
    mean.copy_(torch.where(stays, mean, next_mean))
    square.copy_(torch.where(stays, square, next_square))
    weight.copy_(torch.where(stays, weight, next_weight))


@cache
def _compiled() -> Callable[..., None]:
    """One kernel for matrices of any size."""
    return torch.compile(update, dynamic=True)
