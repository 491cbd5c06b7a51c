"""Gradients that travel compressed between copies of a model: in fewer bits, or as matrices of low rank (PowerSGD)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from shardwise.config import Ddp


def compress(model: DistributedDataParallel, options: Ddp) -> PowerSGD | None:
    """As the options say. Returns the memory that belongs into a checkpoint, where there is one."""
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

    def restore(self, tensors: dict[str, torch.Tensor]) -> bool:
        """False: these are not what `tensors` gave."""
        if "draws" not in tensors:
            return False
        for kind in _MEMORIES:
            memory = {name.split()[1]: tensor for name, tensor in tensors.items() if name.startswith(f"{kind} ")}
            setattr(self.state, f"{kind}_dict", {int(bucket): tensor for bucket, tensor in memory.items()})
        *numbers, position, has_gauss, gauss = tensors["draws"].tolist()
        self.state.rng.set_state(("MT19937", np.array(numbers, np.uint32), int(position), int(has_gauss), gauss))
        self.state.iter = int(tensors["steps"])
        return True

    def forget(self) -> None:
        """Begin anew, after a gradient that was no number: it would stay in here. Every rank does so at the same step."""
        for kind in _MEMORIES:
            getattr(self.state, f"{kind}_dict").clear()


_MEMORIES = ("error", "p_memory", "q_memory")


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


def _low_rank(shape: torch.Size, rank: int) -> int:
    """Numbers that PowerSGD sends of a tensor: two thin matrices where that is less by half, else all of it."""
    if len(shape) < 2:
        return shape.numel()
    rows, columns = shape[0], math.prod(shape[1:])
    thin = min(rows, columns, rank) * (rows + columns)
    return thin if thin * 2 < rows * columns else rows * columns
