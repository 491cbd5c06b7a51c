"""From a recipe for a model to a model on all ranks, with the same weights whatever the strategy.

The weights are made once, on the CPU of rank 0, and travel from there. The other ranks only know the shape (PyTorch's
meta device), and under fsdp no device ever holds the whole model.
"""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from shardwise.config import Training
from shardwise.errors import ConfigError, ShardwiseError
from shardwise.parallel.world import World

Build = Callable[[], nn.Module]
FindBlocks = Callable[[nn.Module], list[nn.Module]]


@dataclass
class Spread:
    model: nn.Module
    """What the task calls."""
    module: nn.Module
    """The same, without a wrapper around it: its names are those of the model as it was built."""

    @contextmanager
    def reducing_gradients(self, now: bool) -> Iterator[None]:
        """Gradients are reduced over the ranks on the last micro-batch only."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(now)
        with self.model.no_sync() if isinstance(self.model, DistributedDataParallel) and not now else nullcontext():
            yield

    @property
    def needs_every_gradient(self) -> bool:
        """DDP leaves a bucket unreduced, without a word, while one of its parameters waits for a gradient."""
        return isinstance(self.model, DistributedDataParallel) and not self.model.find_unused_parameters

    def share_buffers(self) -> None:
        """Running statistics are rank 0's on every rank: to evaluate with, and to save."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            kept = set(self.module.state_dict())
            for name, buffer in self.module.named_buffers():
                if name in kept:
                    dist.broadcast(buffer, src=0)

    def release(self) -> None:
        """Before the process group goes. DDP's reducer would otherwise be the last to hold it, and end it while it holds
        Python's lock, on which the group's own thread may be waiting (torch 2.13: a hang at exit, now and then)."""
        if isinstance(self.model, DistributedDataParallel):
            self.model.logger = None
            self.model.reducer = None  # type: ignore[assignment]


def spread(build: Build, find_blocks: FindBlocks, strategy: str, training: Training, world: World) -> Spread:
    """Tensor types → batch norm → activation checkpointing → sharding or replicas, in this order for every model."""
    fsdp = training.fsdp
    build = _with_batch_norm(build, training, world)
    shape = build() if world.is_first and strategy != "fsdp" else build_shape(build)
    _cast_parameters(shape, training)
    blocks = find_blocks(shape)
    if strategy == "fsdp":
        _refuse_what_cannot_be_sharded(shape)
        weights = _rank_zero_weights(build, shape, training, world)
        units = sharding_units(shape, blocks, fsdp.min_num_params if fsdp else 0)
        if fsdp and fsdp.activation_checkpointing:
            _recompute(shape, blocks)
        return _shard(shape, units, weights, training, world)
    module = materialize(shape, world.device)
    if strategy == "ddp":
        return _replicate(module, training, world)
    return Spread(module, module)


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


def _owners(model: nn.Module) -> Counter[int]:
    """How many modules hold each parameter."""
    return Counter(id(parameter) for module in model.modules() for parameter in module.parameters(recurse=False))


def materialize(model: nn.Module, device: torch.device) -> nn.Module:
    """Move to the device; tensors on meta become empty ones. Unlike Module.to_empty, tied weights stay tied
    (torch 2.13 makes a new parameter for each owner)."""
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in moved:
                here = parameter.device == device
                moved[id(parameter)] = (
                    parameter if here else nn.Parameter(_on(parameter.data, device), parameter.requires_grad)
                )
            module._parameters[name] = moved[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = _on(buffer, device)
    return model


def build_shape(build: Build) -> nn.Module:
    """The model on the meta device: no memory, no weights. A model that cannot be built there is built for real."""
    try:
        with torch.device("meta"):
            shape = build()
    except Exception:
        return build()  # if the model is at fault and not the device, this says so
    # A tensor that is neither parameter nor buffer could not be filled later.
    loose = any(_holds_meta(value) for module in shape.modules() for value in _attributes(module))
    return build() if loose else shape


def _attributes(module: nn.Module) -> list[Any]:
    return [value for name, value in vars(module).items() if name not in ("_parameters", "_buffers", "_modules")]


def _holds_meta(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_holds_meta(item) for item in value.values())
    if isinstance(value, list | tuple | set):
        return any(_holds_meta(item) for item in value)
    return isinstance(value, torch.Tensor) and value.is_meta


@dataclass
class _Weights:
    """The parameters and buffers that rank 0 made; empty on the others."""

    state: dict[str, Any]
    buffers: dict[str, torch.Tensor]


def _rank_zero_weights(build: Build, shape: nn.Module, training: Training, world: World) -> _Weights:
    if not world.is_first:
        return _Weights({}, {})
    whole = build()
    if whole is shape:  # the caller's own module, already built: sharding will take its tensors apart
        whole = copy.deepcopy(whole)
    _cast_parameters(whole, training)
    return _Weights(dict(whole.state_dict()), dict(whole.named_buffers()))


def _cast_parameters(model: nn.Module, training: Training) -> None:
    """bf16-true keeps the weights in bf16. Buffers stay: statistics and rotary frequencies need their digits."""
    if training.precision == "bf16-true":
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.bfloat16()


def _recompute(model: nn.Module, blocks: list[nn.Module]) -> None:
    chosen = {id(block) for block in blocks}
    apply_activation_checkpointing(model, check_fn=lambda module: id(module) in chosen)


def _refuse_what_cannot_be_sharded(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if not parameter.ndim:
            raise ShardwiseError(f"strategy fsdp cannot shard the scalar parameter {name}: give it the shape (1,)")
    first_names: dict[nn.Module, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        # torch 2.13 cannot load the state of a module that has two names.
        if first_names.setdefault(module, name) != name and list(module.parameters()):
            raise ShardwiseError(
                f"strategy fsdp cannot shard {name}, which is {first_names[module]} used again: use ddp"
            )


def _shard(model: nn.Module, units: list[nn.Module], weights: _Weights, training: Training, world: World) -> Spread:
    mesh = _mesh(training, world)
    compute = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(training.precision)
    # Gradients are reduced in fp32 even where the compute type is narrower.
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    for unit in units:
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    materialize(model, world.device)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, weights.state, options=options)
    _broadcast_buffers(model, weights.buffers, world)
    return Spread(model, model)


def _mesh(training: Training, world: World) -> DeviceMesh:
    if training.fsdp is None or training.fsdp.sharding_strategy == "FULL_SHARD":
        return init_device_mesh(world.device.type, (world.size,), mesh_dim_names=("shard",))
    if world.size % training.num_nodes:
        raise ConfigError(f"HYBRID_SHARD: {world.size} ranks do not divide evenly over num_nodes: {training.num_nodes}")
    shape = (training.num_nodes, world.size // training.num_nodes)  # ranks of a machine are numbered side by side
    return init_device_mesh(world.device.type, shape, mesh_dim_names=("replicate", "shard"))


def _broadcast_buffers(model: nn.Module, whole: dict[str, torch.Tensor], world: World) -> None:
    """Buffers come from rank 0 too, those that no state dict carries (rotary frequencies) included."""
    for name, buffer in model.named_buffers():
        if world.is_first:
            buffer.copy_(whole[name.replace("_checkpoint_wrapped_module.", "")])
        if world.size > 1:
            dist.broadcast(buffer, src=0)


def _replicate(module: nn.Module, training: Training, world: World) -> Spread:
    _broadcast_buffers(module, dict(module.named_buffers()), world)
    # A buffer outside the state dict is a constant: only running statistics are worth sending before every forward.
    changing = set(module.state_dict()) - {name for name, _ in module.named_parameters(remove_duplicate=False)}
    model = DistributedDataParallel(
        module,
        device_ids=[world.device.index] if world.device.type == "cuda" else None,
        bucket_cap_mb=training.ddp.bucket_cap_mb,
        find_unused_parameters=training.ddp.find_unused_parameters,
        static_graph=training.ddp.static_graph,
        gradient_as_bucket_view=True,
        **{_BUFFER_OPTION: bool(changing)},  # type: ignore[arg-type]
    )
    return Spread(model, module)


# torch 2.13 renames DDP's option and warns about the old name; 2.11 knows only that.
_BUFFER_OPTION = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)


def _on(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)
