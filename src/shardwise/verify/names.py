"""Parameters have one name in every run, whatever was wrapped around the model."""

from __future__ import annotations

from torch import nn

from shardwise.compat.compiler import name_without_compiled
from shardwise.compat.distributed import name_without_wrapper


def canonical(name: str) -> str:
    """The name in the model as it was built, whatever was wrapped around its parts."""
    return name_without_compiled(name_without_wrapper(name)).removeprefix("module.")


def tied_names(module: nn.Module) -> list[list[str]]:
    """Groups of names that are one and the same parameter."""
    groups: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(canonical(name))
    return sorted(sorted(names) for names in groups.values() if len(names) > 1)
