"""Activation checkpointing: blocks, or operations, that are computed again in the backward pass instead of being kept."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from shardwise.compat.distributed import (
    CheckpointImpl,
    CheckpointWrapper,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    wrapped_block,
)
from shardwise.compat.tensors import ATTENTION_OPERATIONS
from shardwise.config import Fsdp
from shardwise.kernels.attention import OPERATIONS as PACKED_ATTENTION

# What takes long to compute: everything else is cheap to compute again.
_KEPT = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.convolution.default,
    *ATTENTION_OPERATIONS,
    *PACKED_ATTENTION,
]


def recompute(model: nn.Module, blocks: list[nn.Module], options: Fsdp) -> list[nn.Module]:
    """Wraps those that the options choose. Returns the blocks as they are now, each with its wrapper if it has one."""
    if not options.activation_checkpointing:
        return blocks
    wrap = partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    chosen = {id(block) for block in blocks}
    if options.activation_checkpointing == "selective":
        if options.selective == "operations":
            wrap = partial(wrap, context_fn=partial(create_selective_checkpoint_contexts, _KEPT))
        else:
            chosen = {id(block) for block in blocks[:: options.selective]}
    apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrap, check_fn=lambda module: id(module) in chosen)
    wrapped = {id(wrapped_block(module)): module for module in model.modules() if isinstance(module, CheckpointWrapper)}
    return [wrapped.get(id(block), block) for block in blocks]
