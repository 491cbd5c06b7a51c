"""A whole copy of the model on every rank (ddp, zero1), or on every device of one process (dp)."""

from __future__ import annotations

import inspect
import math
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DataParallel, DistributedDataParallel

from shardwise.config import Ddp
from shardwise.kernels.low_precision_weights import LowPrecisionWeights
from shardwise.parallel.world import World


def reaches_masters(options: Ddp) -> bool:
    """Whether gradients of narrow copies can get to fp32 masters: not where a hook of PyTorch's own handles them, or where
    DDP finds out only afterwards which of them there are."""
    return options.comm_hook == "none" and not options.find_unused_parameters


def replicate(
    module: nn.Module, options: Ddp, world: World, narrow: LowPrecisionWeights | None
) -> tuple[DistributedDataParallel, PowerSGD | None]:
    # A buffer outside the state dict is a constant: only running statistics are worth sending before every forward.
    changing = set(module.state_dict()) - {name for name, _ in module.named_parameters(remove_duplicate=False)}
    model = DistributedDataParallel(
        module,
        device_ids=[world.device.index] if world.device.type == "cuda" else None,
        bucket_cap_mb=_bucket(module, options, world),
        find_unused_parameters=options.find_unused_parameters,
        static_graph=options.static_graph,
        gradient_as_bucket_view=options.gradient_as_bucket_view,
        **{_BUFFER_OPTION: bool(changing)},  # type: ignore[arg-type]
    )
    if narrow is not None:
        # A lambda: PyTorch looks at the annotations, and does not know them as text (torch 2.13).
        model.register_comm_hook(narrow, lambda narrow, bucket: _reduce_to_masters(narrow, bucket))
        return model, None
    return model, _compress(model, options)


def _reduce_to_masters(narrow: LowPrecisionWeights, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Gradients of narrow copies are added up in fp32, over the ranks and with those of earlier micro-batches, and left on
    the masters; what DDP has of them is of no further use."""
    arrived = bucket.buffer()
    summed = arrived.to(torch.promote_types(arrived.dtype, torch.float32))
    to_masters, to_ddp = [], []
    for parameter, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
        place = grad.storage_offset() - arrived.storage_offset()
        master, part = narrow.master_of(parameter), summed.as_strided(grad.shape, grad.stride(), place)
        if master is parameter:  # it has no copy, and DDP brings its earlier gradients along
            to_ddp.append((grad, part))
            continue
        to_masters.append((master, part))
        if master.grad is not None:
            part += master.grad
    summed /= dist.get_world_size()

    def leave(_: Any) -> torch.Tensor:
        for master, part in to_masters:
            master.grad = part
        if summed is not arrived:
            for grad, part in to_ddp:
                grad.copy_(part)
        return arrived

    return dist.all_reduce(summed, async_op=True).get_future().then(leave)


class PowerSGD:
    """PowerSGD's memory of a rank: what its low-rank gradients left out so far, and where the next ones start from."""

    def __init__(self, state: powerSGD_hook.PowerSGDState) -> None:
        self.state = state

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {
            f"{kind} {bucket}": tensor
            for kind in _MEMORIES
            for bucket, tensor in getattr(self.state, f"{kind}_dict").items()
        }
        drawn: Any = self.state.rng.get_state()
        _, numbers, position, has_gauss, gauss = drawn
        draws = torch.tensor([*numbers.tolist(), position, has_gauss, gauss], dtype=torch.float64)  # all fit exactly
        return {**found, "draws": draws, "steps": torch.tensor(self.state.iter)}

    def restore(self, tensors: dict[str, torch.Tensor]) -> None:
        for kind in _MEMORIES:
            memory = {name.split()[1]: tensor for name, tensor in tensors.items() if name.startswith(f"{kind} ")}
            setattr(self.state, f"{kind}_dict", {int(bucket): tensor for bucket, tensor in memory.items()})
        *numbers, position, has_gauss, gauss = tensors["draws"].tolist()
        self.state.rng.set_state(("MT19937", np.array(numbers, np.uint32), int(position), int(has_gauss), gauss))
        self.state.iter = int(tensors["steps"])

    def forget(self) -> None:
        """Begin anew, after a gradient that was no number: it would stay in here. Every rank does so at the same step."""
        for kind in _MEMORIES:
            getattr(self.state, f"{kind}_dict").clear()


_MEMORIES = ("error", "p_memory", "q_memory")


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


def _bucket(module: nn.Module, options: Ddp, world: World) -> float:
    """In MB. PowerSGD answers one collective with the next; over gloo those of several buckets get into each other's way
    (torch 2.13: a hang), so all gradients travel in one."""
    if options.comm_hook != "powersgd" or world.device.type == "cuda":
        return options.bucket_cap_mb
    return 1 + sum(parameter.numel() * parameter.element_size() for parameter in module.parameters()) / 2**20


def _compress(model: DistributedDataParallel, options: Ddp) -> PowerSGD | None:
    if options.comm_hook == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif options.comm_hook == "bf16":
        model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    elif options.comm_hook == "powersgd":
        state: Any = powerSGD_hook.PowerSGDState(
            process_group=None,
            matrix_approximation_rank=options.powersgd_rank,
            start_powerSGD_iter=options.powersgd_warmup_steps,
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return PowerSGD(state)
    return None


def _low_rank(shape: torch.Size, rank: int) -> int:
    """Numbers that PowerSGD sends of a tensor: two thin matrices where that is less by half, else all of it."""
    if len(shape) < 2:
        return shape.numel()
    rows, columns = shape[0], math.prod(shape[1:])
    thin = min(rows, columns, rank) * (rows + columns)
    return thin if thin * 2 < rows * columns else rows * columns
