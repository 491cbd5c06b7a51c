"""What lies inside PyTorch's modules and optimizers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.conv import _ConvNd as ConvNd

__all__ = [
    "REGISTERS",
    "BatchNorm",
    "ConvNd",
    "buffers_of",
    "give_marks",
    "parameters_of",
    "plain_attributes",
    "temporary_buffers_of",
    "updates_unless_inf",
]

# BatchNorm, ConvNd: the common base of batch norms and of convolutions in one, two and three dimensions. Seen on 2.11, 2.13,
# 2.15.

REGISTERS = ("_parameters", "_buffers", "_modules")
"""The attributes of a module that hold what is registered with it: any other is the model's own. Seen on 2.11, 2.13, 2.15."""


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The module's own, by name, to read and to replace: `setattr` would refuse a plain tensor, and `named_parameters`
    leaves out None and what is tied. Seen on 2.11, 2.13, 2.15."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """The same of its buffers. Seen on 2.11, 2.13, 2.15."""
    return module._buffers


def temporary_buffers_of(module: nn.Module) -> set[str]:
    """The names of those that no state dict has (`persistent=False`); may be added to. Seen on 2.11, 2.13, 2.15."""
    return module._non_persistent_buffers_set


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Those of the model's own that no register holds: no hooks, and not whether it trains. Seen on 2.11, 2.13, 2.15."""
    others = {*REGISTERS, "_non_persistent_buffers_set", "training"}
    return {name: value for name, value in vars(module).items() if name not in others and "_hooks" not in name}


def give_marks(source: nn.Module, target: nn.Module) -> None:
    """Hooks and attributes of one module, to another that takes its place. Hooks lie in dicts that every module has, by the
    number of their handle. Seen on 2.11, 2.13, 2.15."""
    for name, value in vars(source).items():
        if name in REGISTERS:
            continue
        if name not in vars(target) or (name.endswith("_hooks") and value):
            vars(target)[name] = value


def updates_unless_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step looks at `found_inf` on the device and then changes nothing, as fused ones do: the host need not wait
    to know. GradScaler asks the same. Seen on 2.11, 2.13, 2.15."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))
