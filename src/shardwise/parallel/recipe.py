"""The steps by which a model gets onto the ranks, with the same weights whatever the strategy. Each strategy's `wrap` puts them
together; the order is the same for all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from shardwise.compat.modules import BatchNorm, give_marks
from shardwise.config import Training
from shardwise.errors import ConfigError
from shardwise.kernels.fp8 import fp8_problem, use_fp8
from shardwise.kernels.head import LossHead
from shardwise.kernels.regions import Regions, compile_regions
from shardwise.parallel.parameter_marks import ParameterMarks
from shardwise.parallel.weights import (
    Build,
    FindBlocks,
    Weights,
    broadcast_buffers,
    build_shape,
    cast_parameters,
    check_model,
    low_precision_dtype,
    materialize,
    rank_zero_weights,
)
from shardwise.parallel.world import World

TensorPlan = Callable[[nn.Module, int, bool], Mapping[str, Any] | None]
"""(model, ranks, sequence parallel) → how each module is split, by name; None where the task cannot say."""
Trial = Callable[[nn.Module, torch.device], Tensor]
"""(model, device) → the loss of a few samples."""


@dataclass(frozen=True)
class ModelSpec:
    """The model that is to be laid over the ranks, and what its task says about it."""

    build: Build
    find_blocks: FindBlocks
    """Its repeated blocks: units of sharding, of stages, of activation checkpointing."""
    find_regions: FindBlocks | None
    """What to compile, each on its own; None: nothing."""
    tensor_plan: TensorPlan
    trial: Trial
    micro_batches: int = 1
    """Of a rank, per step."""
    one_size: bool = False
    """It is compiled for inputs of one size."""
    low_precision: bool = False
    """Whole copies of the model compute with low-precision copies of the weights."""


def whole_model(spec: ModelSpec, training: Training, world: World) -> tuple[nn.Module, Regions | None]:
    """All of it on this rank's device, with its compiled regions. On other ranks than the first, weights are still to come."""
    build = with_batch_norm(spec.build, training, world)
    module = build() if world.is_first else build_shape(build)
    check_model(module, world)
    cast_parameters(module, training)
    compiled = spec.find_regions(module) if spec.find_regions else None
    regions = tuned(module, spec.find_blocks(module), compiled, spec.one_size, training, world)
    marks = ParameterMarks(module)
    materialize(module, world.device)
    marks.put_on(module)
    return module, regions


def shape_and_weights(spec: ModelSpec, training: Training, world: World) -> tuple[nn.Module, Weights]:
    """The model without memory, to be taken apart, and its weights on the CPU of rank 0."""
    build = with_batch_norm(spec.build, training, world)
    shape = build_shape(build)
    check_model(shape, world)
    cast_parameters(shape, training)
    return shape, rank_zero_weights(build, shape, training, world)


def receive(model: nn.Module, weights: Weights, world: World) -> None:
    """Every rank gets its part of what rank 0 made."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, weights.state, options=options)
    broadcast_buffers(model, weights.buffers, world)


def copies_dtype(spec: ModelSpec, training: Training, module: nn.Module) -> torch.dtype | None:
    """Of the copies that a whole model computes with; None: it has none. Hooks of parameters would not be called for copies."""
    return low_precision_dtype(training) if spec.low_precision and not ParameterMarks(module).hooked else None


def has_batch_norm(model: nn.Module) -> bool:
    return any(isinstance(module, BatchNorm) for module in model.modules())


def has_synced_batch_norm(model: nn.Module) -> bool:
    return any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())


def with_batch_norm(build: Build, training: Training, world: World) -> Build:
    """The same model; its batch norms see the whole micro-batch of all ranks where the device can do that."""
    on_cuda = world.device.type == "cuda"
    if training.sync_batch_norm and not on_cuda:
        raise ConfigError("training.sync_batch_norm: true needs CUDA; on CPUs batch norm sees a rank's own samples")
    if training.sync_batch_norm is False or not on_cuda or (world.size == 1 and not training.sync_batch_norm):
        return build
    return lambda: _synced(build())


def _synced(model: nn.Module) -> nn.Module:
    """Its batch norms are other modules then, which get what was put on those before: hooks and attributes."""
    before = dict(model.named_modules())
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    for name, module in model.named_modules():
        if module is not before[name]:
            give_marks(before[name], module)
    return model


def tuned(
    model: nn.Module,
    blocks: list[nn.Module],
    compiled: list[nn.Module] | None,
    one_size: bool,
    training: Training,
    world: World,
) -> Regions | None:
    """fp8 and compile regions. `compiled`: what is compiled; None: nothing."""
    if training.precision == "fp8-mixed":
        if problem := fp8_problem(world.device):
            raise ConfigError(f"training.precision: fp8-mixed: {problem}; use bf16-mixed")
        use_fp8(model, blocks)
    if compiled is None:
        return None
    for module in model.modules():
        if isinstance(module, LossHead):
            module.compiled = True
    return compile_regions(compiled, one_size=one_size)
