"""Parameters that a model holds in plain attributes, such as lists, where PyTorch does not look for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from shardwise.compat.modules import REGISTERS


def unregistered_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Each with the attribute that holds it, whether it is registered elsewhere or not. A module that is registered
    elsewhere may be held in a list: it is the same there."""
    known = set(model.modules())
    for path, module in model.named_modules():
        if isinstance(module, nn.RNNBase):
            continue  # its list of weights follows what is set
        for name, value in vars(module).items():
            if name not in REGISTERS:
                for parameter in _parameters_in(value, known):
                    yield f"{path}.{name}".removeprefix("."), parameter


def _parameters_in(value: Any, known: set[nn.Module]) -> Iterator[nn.Parameter]:
    if isinstance(value, nn.Parameter):
        yield value
    elif isinstance(value, nn.Module):
        if value not in known:
            yield from value.parameters()
    elif isinstance(value, dict):
        for item in value.values():
            yield from _parameters_in(item, known)
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from _parameters_in(item, known)
