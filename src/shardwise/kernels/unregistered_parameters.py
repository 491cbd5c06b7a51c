"""Parameters that a model holds in plain attributes, such as lists, or in functions, where PyTorch does not look for them."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from shardwise.compat.modules import REGISTERS
from shardwise.compat.tensors import after_accumulation_of, gradient_hooks_of


def unregistered_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Each with the attribute or hook that holds it, whether it is registered elsewhere or not. A module that is registered
    elsewhere may be held in a list: it is the same there."""
    known = set(model.modules())
    for path, module in model.named_modules():
        if isinstance(module, nn.RNNBase):
            continue  # its list of weights follows what is set
        for name, value in vars(module).items():
            if name not in REGISTERS:
                yield from _parameters_in(f"{path}.{name}".removeprefix("."), value, known)
    for name, parameter in model.named_parameters():
        yield from _parameters_in(f"a mark of {name}", marks_of(parameter), known)


def marks_of(parameter: nn.Parameter) -> list[Any]:
    """What a model's builder has put on it: attributes and hooks."""
    return [dict(vars(parameter)), gradient_hooks_of(parameter), after_accumulation_of(parameter)]


def _parameters_in(where: str, value: Any, known: set[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    for held in held_by(value):
        if isinstance(held, nn.Parameter):
            yield where, held
        elif isinstance(held, nn.Module) and held not in known:
            yield from ((where, parameter) for parameter in held.parameters())


def held_by(value: Any, seen: set[int] | None = None) -> Iterator[Any]:
    """What a value holds, in containers and in functions, however deep: what a function has from where it was made, what is
    bound to it, its defaults."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    within = _within(value)
    if within is None:
        yield value
        return
    seen.add(id(value))
    for each in within:
        yield from held_by(each, seen)


def _within(value: Any) -> Iterable[Any] | None:
    """None: it is no container."""
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, list | tuple | set):
        return list(value)
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, types.MethodType):
        own = value.__self__
        return [
            value.__func__,
            own,
            *(vars(own).values() if not isinstance(own, nn.Module | type) and hasattr(own, "__dict__") else ()),
        ]
    if isinstance(value, types.FunctionType):
        cells = [_content(cell) for cell in value.__closure__ or ()]
        return [*cells, value.__defaults__, value.__kwdefaults__]
    return None


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None
