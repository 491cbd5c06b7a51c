"""The gradient's true global norm, whether parameters are whole or sharded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.compat.tensors import foreach_mul_, foreach_norm


def gradients(
    parameters: Iterable[nn.Parameter], of: Callable[[nn.Parameter], Tensor | None] = lambda parameter: parameter.grad
) -> list[Tensor]:
    """Those that there are."""
    return [grad for parameter in parameters if (grad := of(parameter)) is not None]


def global_norm(grads: list[Tensor]) -> Tensor:
    """The 2-norm over all gradients of all ranks, as a plain tensor; the same on every rank.

    Norms are taken per device mesh and combined: torch 2.13 refuses to mix meshes in one call.
    """
    norms = []
    for group in _by_kind(grads):
        if isinstance(group[0], DTensor):
            norm = torch.nn.utils.get_total_norm(group)
            norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        else:  # of narrow gradients too, in fp32
            norms += foreach_norm(group, 2, dtype=torch.promote_types(group[0].dtype, torch.float32))
    home = norms[0].device if norms else None
    return torch.linalg.vector_norm(torch.stack([norm.float().to(home) for norm in norms] or [torch.zeros(())]))


def clip(grads: list[Tensor], norm: float, limit: float) -> None:
    """Scale the gradients so that their global norm is at most `limit`."""
    if norm > limit:
        for group in _by_kind(grads):
            foreach_mul_(group, limit / (norm + 1e-6))


def _by_kind(grads: list[Tensor]) -> list[list[Tensor]]:
    """By mesh and type."""
    groups: dict[object, list[Tensor]] = defaultdict(list)
    for grad in grads:
        groups[grad.device_mesh if isinstance(grad, DTensor) else None, grad.dtype].append(grad)
    return list(groups.values())
