"""What is to be known of an optimizer: which class of PyTorch it is, and with which settings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.config.registry import known, load, lookup
from shardwise.config.schema import Optimizer
from shardwise.errors import ConfigError


class UpdateRule:
    name: ClassVar[str]
    kind: ClassVar[type[torch.optim.Optimizer]]
    """What is made of groups of parameters, each with its weight decay. Its state is tensors that are zero before the first step:
    every parameter has them from the beginning, so that a checkpoint always has the same names."""

    def __init__(self, options: Optimizer) -> None:
        self.options = options

    def settings(self, parameters: Sequence[nn.Parameter]) -> dict[str, Any]:
        """What else `kind` is made with, besides the rate."""
        return {"fused": fused(parameters)}

    def group_settings(
        self, module: nn.Module, name: str, parameter: nn.Parameter, *, in_block: bool, decays: bool
    ) -> dict[str, Any]:
        """What it is to know of a parameter of `module`: parameters of which it is told different things are in different groups,
        which have that as settings. `in_block`: it lies in one of the model's repeated blocks."""
        return {}

    @property
    def moments(self) -> int:
        """Numbers of state for each weight: two, as Adam has."""
        return 2

    def refusals(self, *, whole: bool) -> Iterator[str]:
        """What it cannot do: each with the reason, and what works. `whole`: every rank holds whole parameters."""
        return iter(())


def update_rule(options: Optimizer) -> UpdateRule:
    """A file beside this one, or one that another package brings (entry point `shardwise.optimizers`)."""
    entry = lookup("shardwise.optimizers", options.name)
    if entry is None:
        raise ConfigError(
            f"there is no optimizer {options.name!r}; there is {', '.join(known('shardwise.optimizers'))}"
        )
    found = load(entry)
    if not (isinstance(found, type) and issubclass(found, UpdateRule)):
        raise ConfigError(f"optimizer {options.name} stands for {entry.value}, which is not a subclass of UpdateRule")
    return found(options)


def fused(parameters: Sequence[nn.Parameter]) -> bool | None:
    """PyTorch's fastest way, where there is a GPU."""
    return True if any(parameter.is_cuda for parameter in parameters) else None


def sharded(parameters: Sequence[nn.Parameter]) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in parameters)
