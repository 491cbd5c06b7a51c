"""Every rank holds a part of each parameter, and of its gradient and optimizer state (`fully_shard`)."""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from shardwise.config import Fsdp, Training
from shardwise.errors import ShardwiseError
from shardwise.kernels.unregistered_parameters import unregistered_parameters
from shardwise.parallel.layout import Layout
from shardwise.parallel.weights import narrow_type


def shard(model: nn.Module, blocks: list[nn.Module], training: Training, layout: Layout) -> None:
    """Each block is a unit that is gathered when it computes; all else forms the outermost unit."""
    options = training.fsdp or Fsdp()
    policy = MixedPrecisionPolicy(
        param_dtype=narrow_type(training), reduce_dtype=torch.float32 if options.reduce_in == "fp32" else None
    )
    offload = (
        CPUOffloadPolicy(pin_memory=layout.world.device.type == "cuda") if options.cpu_offload else OffloadPolicy()
    )
    units = sharding_units(model, blocks, options.min_num_params)
    for unit in [*units, model]:
        fully_shard(
            unit,
            mesh=layout.sharding_mesh,
            reshard_after_forward=unit is not model and options.sharding_strategy != "SHARD_GRAD_OP",
            mp_policy=policy,
            offload_policy=offload,
        )
    if options.prefetch > 1:
        _gather_ahead([unit for unit in units if isinstance(unit, FSDPModule)], options.prefetch)


def sharding_units(model: nn.Module, blocks: list[nn.Module], min_num_params: int) -> list[nn.Module]:
    """The blocks that are sharded on their own; all else forms the outermost unit.

    A block that shares a weight with anything outside it must stay in the outermost unit: a parameter that two units
    own would be reduced twice.
    """
    owners = _owners(model)
    units = []
    for block in blocks:
        shared = any(owners[key] > times for key, times in _owners(block).items())
        if not shared and sum(parameter.numel() for parameter in block.parameters()) >= min_num_params:
            units.append(block)
    return units


def refuse_what_cannot_be_sharded(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if not parameter.ndim:
            raise ShardwiseError(f"strategy fsdp cannot shard the scalar parameter {name}: give it the shape (1,)")
    names = {parameter: name for name, parameter in model.named_parameters()}
    for where, parameter in unregistered_parameters(model):
        if parameter in names:  # it would stay whole there, and never be trained
            raise ShardwiseError(
                f"strategy fsdp cannot shard {names[parameter]}, which {where} holds too, outside of PyTorch's sight: use ddp, "
                "or reach it through its module alone"
            )
    first_names: dict[nn.Module, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        # torch 2.13 cannot load the state of a module that has two names.
        if first_names.setdefault(module, name) != name and list(module.parameters()):
            raise ShardwiseError(
                f"strategy fsdp cannot shard {name}, which is {first_names[module]} used again: use ddp"
            )


def _gather_ahead(units: list[FSDPModule], depth: int) -> None:
    for position, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(units[position + 1 : position + 1 + depth])
        unit.set_modules_to_backward_prefetch(units[max(0, position - depth) : position][::-1])


def _owners(model: nn.Module) -> Counter[int]:
    """How many modules hold each parameter."""
    return Counter(id(parameter) for module in model.modules() for parameter in module.parameters(recurse=False))
