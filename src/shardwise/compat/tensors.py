"""Operations on tensors, and containers of tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import (
    TreeSpec,
    tree_flatten,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
    treespec_dumps,
    treespec_loads,
)

__all__ = [
    "ATTENTION_OPERATIONS",
    "TorchDispatchMode",
    "TreeSpec",
    "after_accumulation_of",
    "foreach_add_",
    "foreach_copy_",
    "foreach_mul_",
    "foreach_norm",
    "gradient_hooks_of",
    "memory_of",
    "put_after_accumulation",
    "put_gradient_hooks",
    "scaled_mm",
    "tree_flatten",
    "tree_leaves",
    "tree_map_only",
    "tree_unflatten",
    "treespec_dumps",
    "treespec_loads",
    "varlen_operations",
]

# TorchDispatchMode: sees every operation within it, in C++ too: random fills are caught there. Seen on 2.11, 2.13, 2.15.
# Trees: tensors in whatever holds them. Hugging Face registers its classes with these functions, and torch has no public ones
# for Python's own containers. Seen on 2.11, 2.13, 2.15.

foreach_norm = torch._foreach_norm
"""The norms of many tensors in a few kernels. Seen on 2.11, 2.13, 2.15."""
foreach_mul_ = torch._foreach_mul_
"""Many tensors times one number, in place. Seen on 2.11, 2.13, 2.15."""
foreach_add_ = torch._foreach_add_
"""Many sums in place. Seen on 2.11, 2.13, 2.15."""
foreach_copy_ = torch._foreach_copy_
"""Many copies, each with its own cast. Seen on 2.11, 2.13, 2.15."""
scaled_mm = torch._scaled_mm
"""A product of two fp8 matrices with their scales. Seen on 2.11, 2.13, 2.15."""


def memory_of(tensor: Tensor) -> tuple[int, int]:
    """Where it begins, also on the meta device, where addresses are 0: Tensor.is_set_to has no answer there. Seen on 2.11, 2.13,
    2.15."""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


ATTENTION_OPERATIONS = [
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
]
"""What `scaled_dot_product_attention` becomes: its outputs are kept where cheaper ones are recomputed. Seen on 2.11, 2.13,
2.15."""


def varlen_operations() -> list[torch._ops.OpOverload]:
    """What `varlen_attn` becomes, for the same list; its module must have been imported. Seen on 2.11, 2.13, 2.15."""
    return [torch.ops.torch_attn._varlen_attn.default]


def gradient_hooks_of(tensor: Tensor) -> dict[int, Any] | None:
    """Those of `register_hook`, of a leaf; None: there never was one. Seen on 2.11, 2.13, 2.15."""
    return tensor._backward_hooks


def put_gradient_hooks(tensor: Tensor, hooks: dict[int, Any]) -> None:
    """The very same ones, which their handles remove here, too. Seen on 2.11, 2.13, 2.15."""
    tensor._backward_hooks = hooks


def after_accumulation_of(tensor: Tensor) -> dict[int, Any] | None:
    """Those of `register_post_accumulate_grad_hook`. `fully_shard` calls those of the sharded parameter, too, when it has its
    reduced gradient. Seen on 2.11, 2.13, 2.15."""
    return tensor._post_accumulate_grad_hooks


def put_after_accumulation(tensor: Tensor, hooks: dict[int, Any]) -> None:
    """The very same ones. Seen on 2.11, 2.13, 2.15."""
    tensor._post_accumulate_grad_hooks = hooks
