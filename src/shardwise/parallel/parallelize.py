"""How a model gets onto all ranks, with the same weights whatever the strategy. `parallelize` is the recipe."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from shardwise.config import Fsdp, Training
from shardwise.errors import ConfigError
from shardwise.kernels.fp8 import fp8_problem, use_fp8
from shardwise.kernels.head import LossHead
from shardwise.kernels.low_precision_weights import LowPrecisionWeights
from shardwise.kernels.regions import Regions, compile_regions
from shardwise.parallel.activation_checkpointing import recompute
from shardwise.parallel.layout import Layout
from shardwise.parallel.pipeline import Pipeline, Trial, build_pipeline
from shardwise.parallel.replicate import PowerSGD, over_devices, reaches_masters, replicate
from shardwise.parallel.shard import refuse_what_cannot_be_sharded, shard
from shardwise.parallel.tensor import TensorPlan, split_matrices
from shardwise.parallel.weights import (
    Build,
    FindBlocks,
    Weights,
    broadcast_buffers,
    broadcast_parameters,
    build_shape,
    cast_parameters,
    materialize,
    narrow_type,
    rank_zero_weights,
    refuse_hidden_parameters,
)
from shardwise.parallel.world import World


@dataclass
class ParallelModel:
    model: nn.Module
    """What the task calls."""
    module: nn.Module
    """The same, without a wrapper around it: its names are those of the model as it was built."""
    layout: Layout
    reduce_always: bool = False
    """Gradients are reduced over the ranks on every micro-batch."""
    pipeline: Pipeline | None = None
    memory: PowerSGD | None = None
    """What compressed gradients left out so far; it belongs into a checkpoint."""
    narrow: LowPrecisionWeights | None = None
    """Copies that the model computes with; where it is sharded, `fully_shard` makes them."""
    updates_from_copies: bool = False
    """The optimizer takes gradients from the copies."""
    regions: Regions | None = None
    """Its blocks, where they are compiled."""

    @property
    def whole(self) -> nn.Module:
        """The whole model, to be looked at and counted, not to be computed with."""
        return self.module if self.pipeline is None else self.pipeline.whole

    @cached_property
    def statistics(self) -> list[torch.Tensor]:
        """The buffers that belong into a checkpoint, such as batch norm's: a forward pass may change them."""
        return [
            buffer
            for module in self.module.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in module._non_persistent_buffers_set
        ]

    def gradient_of(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Wherever it is: it may have stayed with a narrow copy."""
        return parameter.grad if self.narrow is None else self.narrow.gradient_of(parameter)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Forward and backward passes happen in here: the model has the weights that it computes with."""
        with self.narrow.in_place() if self.narrow is not None else nullcontext():
            yield

    @contextmanager
    def reducing_gradients(self, now: bool, only: bool = False) -> Iterator[None]:
        """Gradients are reduced over the ranks on the last micro-batch only, unless the user chose otherwise.

        `only`: there is no other micro-batch in this step, so that nothing has to be added to its gradients.
        """
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(now or self.reduce_always)
        replicated = isinstance(self.model, DistributedDataParallel)
        if self.narrow is not None:
            self.narrow.collecting = not (only and self.updates_from_copies)
        with self.model.no_sync() if isinstance(self.model, DistributedDataParallel) and not now else nullcontext():
            yield
        if self.narrow is not None:
            if replicated and now:
                self.narrow.drop()  # they were reduced onto the masters
            elif self.narrow.collecting:
                self.narrow.collect()

    @property
    def needs_every_gradient(self) -> bool:
        """DDP leaves a bucket unreduced, without a word, while one of its parameters waits for a gradient."""
        if self.pipeline is not None:
            return True
        return isinstance(self.model, DistributedDataParallel) and not self.model.find_unused_parameters

    @property
    def settles_later(self) -> bool:
        """DDP decides after its first backward pass which gradients travel together."""
        matters = self.memory is not None or self.layout.world.size > 1
        return isinstance(self.model, DistributedDataParallel) and matters

    def share_buffers(self) -> None:
        """Running statistics are those of the first copy on every rank: to evaluate with, and to save."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            kept = set(self.module.state_dict())
            for name, buffer in self.module.named_buffers():
                if name in kept:
                    dist.broadcast(buffer, src=self.layout.first_copy, group=self.layout.copies)

    def release(self) -> None:
        """Before the process group goes. DDP's reducer would otherwise be the last to hold it, and end it while it holds
        Python's lock, on which the group's own thread may be waiting (torch 2.13: a hang at exit, now and then)."""
        if isinstance(self.model, DistributedDataParallel):
            self.model.logger = None
            self.model.reducer = None  # type: ignore[assignment]


def parallelize(
    build: Build,
    find_blocks: FindBlocks,
    plan: TensorPlan,
    strategy: str,
    training: Training,
    layout: Layout,
    micro_batches: int,
    trial: Trial,
    *,
    find_regions: FindBlocks | None = None,
    one_size: bool = False,
    narrows: bool = False,
) -> ParallelModel:
    """Tensor types → batch norm → stages → split matrices → fp8 → compile regions → activation checkpointing → sharding or
    replicas → weights, in this order for every model. `find_regions`: what to compile; None: nothing.
    `one_size`: it is compiled for inputs of one size. `narrows`: whole copies of the model compute with narrow weights too."""
    world = layout.world
    build = _with_batch_norm(build, training, world)
    if strategy in ("single", "dp", "ddp", "zero1"):
        return _whole_copies(build, find_blocks, find_regions, one_size, strategy, training, layout, narrows)
    shape = build_shape(build)
    refuse_hidden_parameters(shape)
    cast_parameters(shape, training)
    weights = rank_zero_weights(build, shape, training, world)
    if strategy == "pipeline":
        pipeline = build_pipeline(shape, find_blocks, weights, training, layout, micro_batches, trial)
        return ParallelModel(pipeline, pipeline.names, layout, pipeline=pipeline)
    refuse_what_cannot_be_sharded(shape)
    fsdp = training.fsdp or Fsdp()
    blocks = find_blocks(shape)
    if strategy == "tensor":
        split_matrices(shape, plan, training, layout)
    compiled = regions_of_shards(find_regions(shape), blocks) if find_regions else None
    regions = _tuned(shape, blocks, compiled, one_size, training, world)
    blocks = recompute(shape, blocks, fsdp)
    if strategy == "fsdp" or layout.data_size > 1:
        shard(shape, blocks, training, layout)
    materialize(shape, world.device, parameters=torch.device("cpu") if fsdp.cpu_offload else None)
    _receive(shape, weights, world)
    return ParallelModel(shape, shape, layout, reduce_always=fsdp.reduce_every_micro_batch, regions=regions)


def has_batch_norm(model: nn.Module) -> bool:
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


def _with_batch_norm(build: Build, training: Training, world: World) -> Build:
    """The same model; its batch norms see the whole micro-batch of all ranks where the device can do that."""
    on_cuda = world.device.type == "cuda"
    if training.sync_batch_norm and not on_cuda:
        raise ConfigError("training.sync_batch_norm: true needs CUDA; on CPUs batch norm sees a rank's own samples")
    if training.sync_batch_norm is False or not on_cuda or (world.size == 1 and not training.sync_batch_norm):
        return build
    return lambda: nn.SyncBatchNorm.convert_sync_batchnorm(build())


def _tuned(
    model: nn.Module,
    blocks: list[nn.Module],
    compiled: list[nn.Module] | None,
    one_size: bool,
    training: Training,
    world: World,
) -> Regions | None:
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


def regions_of_shards(regions: list[nn.Module], blocks: list[nn.Module]) -> list[nn.Module]:
    """A block is gathered as it begins, which nothing compiled may have in it: what is compiled lies within blocks, or is the
    blocks themselves."""
    within = {module for block in blocks for module in block.modules()}
    return regions if within.issuperset(regions) else blocks


def _whole_copies(
    build: Build,
    find_blocks: FindBlocks,
    find_regions: FindBlocks | None,
    one_size: bool,
    strategy: str,
    training: Training,
    layout: Layout,
    narrows: bool,
) -> ParallelModel:
    world = layout.world
    module = build() if world.is_first else build_shape(build)
    refuse_hidden_parameters(module)
    cast_parameters(module, training)
    compiled = find_regions(module) if find_regions else None
    regions = _tuned(module, find_blocks(module), compiled, one_size, training, world)
    materialize(module, world.device)
    if strategy == "dp":
        return ParallelModel(over_devices(module), module, layout, regions=regions)
    broadcast_buffers(module, dict(module.named_buffers()), world)
    dtype = narrow_type(training) if narrows else None
    if strategy == "single":
        narrow = LowPrecisionWeights(module, dtype) if dtype else None
        if narrow is not None:
            narrow.collect_as_they_come()
        return ParallelModel(module, module, layout, narrow=narrow, regions=regions)
    narrow = None
    if dtype and reaches_masters(training.ddp):
        broadcast_parameters(module, world)  # DDP will see the copies only
        narrow = LowPrecisionWeights(module, dtype)
    with narrow.in_place() if narrow is not None else nullcontext():
        model, memory = replicate(module, training.ddp, world, narrow)
    return ParallelModel(model, module, layout, memory=memory, narrow=narrow, regions=regions)


def _receive(model: nn.Module, weights: Weights, world: World) -> None:
    """Every rank gets its part of what rank 0 made."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, weights.state, options=options)
    broadcast_buffers(model, weights.buffers, world)
