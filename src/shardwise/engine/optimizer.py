"""The update rule, with weight decay where it belongs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwise.config.schema import Optimizer
from shardwise.errors import ShardwiseError


def build_optimizer(model: nn.Module, options: Optimizer, lr: float) -> torch.optim.Optimizer:
    """Built after the model has been spread: the optimizer must hold the sharded parameters."""
    groups = parameter_groups(model, options.weight_decay)
    if not groups:
        raise ShardwiseError("the model has nothing to train: none of its parameters requires a gradient")
    optimizer = _optimizer(groups, options, lr)
    _make_state(optimizer)
    return optimizer


def _optimizer(groups: list[dict[str, Any]], options: Optimizer, lr: float) -> torch.optim.Optimizer:
    if options.name == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=options.momentum)
    kind = torch.optim.AdamW if options.name == "adamw" else torch.optim.Adam
    on_cuda = any(parameter.is_cuda for group in groups for parameter in group["params"])
    settings: dict[str, Any] = {"betas": (options.betas[0], options.betas[1]), "eps": options.eps}
    return kind(groups, lr=lr, fused=True if on_cuda else None, **settings)


def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """Moments for every parameter from the start, all zero, as they are before a first step.

    PyTorch makes them when a parameter gets its first gradient. A checkpoint of a parameter that never got one would lack
    them, and could not be loaded; and what `get_state_dict` (torch 2.13) makes up for them counts a step.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.zero_()


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay; norms, biases and other vectors do not."""
    decayed: dict[int, nn.Parameter] = {}
    plain: dict[int, nn.Parameter] = {}
    for module in model.modules():
        is_norm = "norm" in type(module).__name__.lower()
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad or id(parameter) in decayed or id(parameter) in plain:
                continue
            vector = is_norm or parameter.ndim < 2 or name.endswith("bias")
            (plain if vector else decayed)[id(parameter)] = parameter
    groups = [(list(decayed.values()), weight_decay), (list(plain.values()), 0.0)]
    return [{"params": params, "weight_decay": decay} for params, decay in groups if params]
