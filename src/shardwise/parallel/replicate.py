"""A whole copy of the model on every rank (ddp, zero1), or on every device of one process (dp)."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DataParallel, DistributedDataParallel

from shardwise.config import Ddp
from shardwise.errors import ConfigError
from shardwise.parallel.world import World


def replicate(
    module: nn.Module, options: Ddp, world: World, group: dist.ProcessGroup | None = None
) -> DistributedDataParallel:
    # A buffer outside the state dict is a constant: only running statistics are worth sending before every forward.
    changing = set(module.state_dict()) - {name for name, _ in module.named_parameters(remove_duplicate=False)}
    model = DistributedDataParallel(
        module,
        device_ids=[world.device.index] if world.device.type == "cuda" else None,
        process_group=group,
        bucket_cap_mb=options.bucket_cap_mb,
        find_unused_parameters=options.find_unused_parameters,
        static_graph=options.static_graph,
        gradient_as_bucket_view=options.gradient_as_bucket_view,
        **{_BUFFER_OPTION: bool(changing)},  # type: ignore[arg-type]
    )
    _compress(model, options, world)
    return model


def over_devices(module: nn.Module) -> nn.Module:
    """One process, all CUDA devices; with one, or none, the plain module."""
    return DataParallel(module) if torch.cuda.device_count() > 1 else module


def gradient_bytes(module: nn.Module, options: Ddp) -> tuple[int, int]:
    """Bytes of gradients that a rank hands over per step: whole, and compressed."""
    sizes = [
        (parameter.shape, parameter.element_size()) for parameter in module.parameters() if parameter.requires_grad
    ]
    whole = sum(shape.numel() * size for shape, size in sizes)
    if options.comm_hook in ("fp16", "bf16"):
        return whole, sum(shape.numel() * 2 for shape, _ in sizes)
    if options.comm_hook == "powersgd":
        return whole, sum(_low_rank(shape, options.powersgd_rank) * size for shape, size in sizes)
    return whole, whole


# torch 2.13 renames DDP's option and warns about the old name; 2.11 knows only that.
_BUFFER_OPTION = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)


def _compress(model: DistributedDataParallel, options: Ddp, world: World) -> None:
    if options.comm_hook == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif options.comm_hook == "bf16":
        if world.device.type == "cpu":
            raise ConfigError("training.ddp.comm_hook: bf16 needs NCCL; between CPU ranks fp16 does the same")
        model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    elif options.comm_hook == "powersgd":
        state: Any = powerSGD_hook.PowerSGDState(
            process_group=None,
            matrix_approximation_rank=options.powersgd_rank,
            start_powerSGD_iter=options.powersgd_warmup_steps,
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def _low_rank(shape: torch.Size, rank: int) -> int:
    """Numbers that PowerSGD sends of a tensor: two thin matrices where that is less by half, else all of it."""
    if len(shape) < 2:
        return shape.numel()
    rows, columns = shape[0], math.prod(shape[1:])
    thin = min(rows, columns, rank) * (rows + columns)
    return thin if thin * 2 < rows * columns else rows * columns
