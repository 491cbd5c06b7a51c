"""The update rule, with weight decay where it belongs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.checkpoint.state import check_optimizer, local_part
from shardwise.config.schema import Optimizer
from shardwise.errors import ShardwiseError
from shardwise.kernels.low_precision_adamw import LowPrecisionAdamW
from shardwise.kernels.low_precision_weights import LowPrecisionWeights
from shardwise.optimizers import UpdateRule, update_rule

Make = Callable[[Callable[..., torch.optim.Optimizer], list[dict[str, Any]], dict[str, Any]], torch.optim.Optimizer]


def build_optimizer(
    model: nn.Module,
    options: Optimizer,
    lr: float,
    *,
    blocks: Sequence[nn.Module] = (),
    make: Make = lambda kind, groups, settings: kind(groups, **settings),
    copies: LowPrecisionWeights | None = None,
) -> torch.optim.Optimizer:
    """Built after a strategy has laid the model over the ranks: the optimizer must hold the parameters as they are there.

    `blocks`: those that the model repeats. `make`: the strategy's way to make one. `copies`: low-precision weights that the
    model computes with, where the update may take gradients from them; it is compiled then.
    """
    groups = parameter_groups(model, options.weight_decay, update_rule(options), blocks)
    if not groups:
        raise ShardwiseError("the model has nothing to train: none of its parameters requires a gradient")
    kind, settings = _kind_of(groups, options)
    if copies is not None and kind is torch.optim.AdamW:
        kind = LowPrecisionAdamW
    optimizer = make(kind, groups, {"lr": lr, **settings})
    check_optimizer(model, optimizer)
    _make_state(local_part(optimizer))
    if isinstance(optimizer, LowPrecisionAdamW):
        optimizer.copies = copies
    return optimizer


def _kind_of(groups: list[dict[str, Any]], options: Optimizer) -> tuple[Any, dict[str, Any]]:
    rule = update_rule(options)
    return rule.kind, rule.settings([parameter for group in groups for parameter in group["params"]])


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


def parameter_groups(
    model: nn.Module, weight_decay: float, rule: UpdateRule | None = None, blocks: Sequence[nn.Module] = ()
) -> list[dict[str, Any]]:
    """Matrices decay; norms, biases and other vectors do not. One group has parameters of one device mesh: PyTorch
    (torch 2.13) updates no others together; and the settings that the rule has for them."""
    within = {id(module) for block in blocks for module in block.modules()}
    seen: set[int] = set()
    groups: dict[tuple[bool, object, tuple[tuple[str, Any], ...]], list[nn.Parameter]] = defaultdict(list)
    for module in model.modules():
        is_norm = "norm" in type(module).__name__.lower()
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            decays = not (is_norm or parameter.ndim < 2 or name.endswith("bias"))
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            own = (
                rule.group_settings(module, name, parameter, in_block=id(module) in within, decays=decays)
                if rule
                else {}
            )
            groups[decays, mesh, tuple(own.items())].append(parameter)
    return [
        {"params": params, "weight_decay": weight_decay if decays else 0.0, **dict(own)}
        for (decays, _, own), params in sorted(groups.items(), key=lambda item: not item[0][0])
    ]
