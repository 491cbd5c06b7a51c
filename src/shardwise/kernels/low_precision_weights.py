"""Weights in the narrow type, made once per step: fp32 master weights keep every digit of an update, and matrix products
read copies of half the size. Autocast alone would cast them at every use, and leave sums between them in fp32.

The copies take the masters' place in the modules while the model computes. Gradients arrive at the copies, and are added up
on the masters in fp32: so optimizer, clipping, checkpoints and names know of the masters only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from shardwise.compat.modules import ConvNd, parameters_of
from shardwise.compat.tensors import foreach_add_, foreach_copy_
from shardwise.kernels.unregistered_parameters import unregistered_parameters

AT_ONCE = 2**28
"""Bytes of gradients that are handed over together: one by one, the many small copies would take twice as long."""
# What autocast would cast at every use. PyTorch's own norms it computes in fp32; other modules may do anything with theirs.
_NARROWED = (nn.Linear, nn.Embedding, ConvNd, nn.MultiheadAttention)


class LowPrecisionWeights:
    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self._copy_of: dict[nn.Parameter, nn.Parameter] = {}
        self._places: list[tuple[nn.Module, str, nn.Parameter]] = []
        wide = _used_as_they_are(model)
        for module in model.modules():
            if not _is_narrowed(module):
                continue
            for name, master in parameters_of(module).items():
                # What is frozen may be moved by other means, as the teacher of a student is, and has to keep every digit.
                if master is None or master.dtype != torch.float32 or not master.requires_grad or master in wide:
                    continue
                if master not in self._copy_of:  # a tied weight has one copy too
                    self._copy_of[master] = nn.Parameter(master.detach().to(dtype))
                    vars(self._copy_of[master]).update(vars(master))  # what the model may look for on it
                self._places.append((module, name, master))
        self._master_of = {copy: master for master, copy in self._copy_of.items()}
        self.collecting = True
        """Whether gradients go to the masters as they come."""
        self._waiting_bytes = 0
        """Of gradients that have come and are not with their masters yet."""

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Copies of what the masters are now are what the model computes with, until the end of it."""
        if self._copy_of:
            with torch.no_grad():
                foreach_copy_([*self._copy_of.values()], [*self._copy_of])
        for module, name, master in self._places:
            parameters_of(module)[name] = self._copy_of[master]
        try:
            yield
        finally:
            for module, name, master in self._places:
                parameters_of(module)[name] = master

    def master_of(self, parameter: Tensor) -> nn.Parameter:
        """That of a copy; of what is no copy, itself."""
        assert isinstance(parameter, nn.Parameter)
        return self._master_of.get(parameter, parameter)

    @property
    def copies(self) -> list[nn.Parameter]:
        return list(self._master_of)

    def has(self, master: nn.Parameter) -> bool:
        return master in self._copy_of

    def gradient_of(self, master: nn.Parameter) -> Tensor | None:
        """Its own or, where that has not been collected, its copy's."""
        return self._copy_of[master].grad if master.grad is None and master in self._copy_of else master.grad

    def collect_as_they_come(self) -> None:
        """From now on gradients go to the masters during the backward pass, so that few exist twice."""
        # Weakly: Python's garbage collection does not see what a tensor's hooks hold, and would never free what holds the tensor.
        came = WeakMethod(self._came)
        for copy in self._master_of:
            copy.register_post_accumulate_grad_hook(
                lambda copy: method(copy) if (method := came()) is not None else None
            )

    def collect(self, without: Collection[nn.Parameter] = ()) -> None:
        """Every gradient that there is goes to its master."""
        _hand_over(
            [
                (copy, master)
                for copy, master in self._master_of.items()
                if copy.grad is not None and master not in without
            ]
        )
        self._waiting_bytes = 0

    def drop(self) -> None:
        """Gradients that have got to the masters another way."""
        for copy in self._master_of:
            copy.grad = None

    def _came(self, copy: Tensor) -> None:
        if not self.collecting:
            return
        self._waiting_bytes += copy.nbytes
        if self._waiting_bytes >= AT_ONCE:
            self.collect()


def _used_as_they_are(model: nn.Module) -> set[nn.Parameter]:
    """Parameters that are also used where no copy takes their place. With one, half of the gradient would come to the copy
    and half to the master, and DDP would take the two for different parameters."""
    elsewhere = (
        each for module in model.modules() if not _is_narrowed(module) for each in module.parameters(recurse=False)
    )
    return {*elsewhere, *(parameter for _, parameter in unregistered_parameters(model))}


def _is_narrowed(module: nn.Module) -> bool:
    if isinstance(module, nn.Embedding) and module.max_norm is not None:
        return False  # it writes into its weights
    name = type(module).__name__
    # Transformers' own: a norm that only multiplies, and GPT-2's linear layer.
    return isinstance(module, _NARROWED) or (name.endswith("RMSNorm") and name != "RMSNorm") or name == "Conv1D"


@torch.no_grad()
def _hand_over(pairs: list[tuple[nn.Parameter, nn.Parameter]]) -> None:
    new = [(copy, master) for copy, master in pairs if master.grad is None]
    more = [(copy, master) for copy, master in pairs if master.grad is not None]
    if new:
        for _, master in new:
            master.grad = torch.empty_like(master)
        foreach_copy_([_grad(master) for _, master in new], [_grad(copy) for copy, _ in new])
    if more:
        foreach_add_([_grad(master) for _, master in more], [_grad(copy) for copy, _ in more])
    for copy, _ in pairs:
        copy.grad = None


def _grad(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
