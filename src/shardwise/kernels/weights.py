"""Weights in the narrow type, made once per step: fp32 master weights keep every digit of an update, and matrix products
read copies of half the size. Autocast alone would cast them at every use, and leave norms and sums in fp32.

The copies take the masters' place in the modules while the model computes. Gradients arrive at the copies, and are added up
on the masters in fp32: so optimizer, clipping, checkpoints and names know of the masters only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class NarrowWeights:
    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self._copies: dict[nn.Parameter, nn.Parameter] = {}
        self._places: list[tuple[nn.Module, str, nn.Parameter]] = []
        for module in model.modules():
            for name, master in module._parameters.items():
                if master is None or master.dtype != torch.float32:
                    continue
                if master not in self._copies:  # a tied weight has one copy too
                    self._copies[master] = nn.Parameter(master.detach().to(dtype), master.requires_grad)
                self._places.append((module, name, master))
        self.masters: list[Tensor] = list(self._copies)
        self.copies: list[Tensor] = list(self._copies.values())

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The copies of what the masters are now; until the end of it they are what the model computes with."""
        with torch.no_grad():
            torch._foreach_copy_(self.copies, self.masters)
        for module, name, master in self._places:
            module._parameters[name] = self._copies[master]
        try:
            yield
        finally:
            for module, name, master in self._places:
                module._parameters[name] = master

    def collect_at_once(self) -> None:
        """Every gradient goes to its master as soon as it is there, and its copy's is let go."""
        for master, copy in self._copies.items():
            if copy.requires_grad:
                copy.register_post_accumulate_grad_hook(lambda copy, master=master: _hand_over(copy, master))

    def collect(self) -> None:
        """What gradients there are, in one go."""
        for master, copy in self._copies.items():
            if copy.grad is not None:
                _hand_over(copy, master)


def _hand_over(copy: nn.Parameter, master: nn.Parameter) -> None:
    assert copy.grad is not None
    if master.grad is None:
        master.grad = copy.grad.to(master.dtype)
    else:
        master.grad += copy.grad
    copy.grad = None
