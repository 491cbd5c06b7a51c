"""What spreads a model over ranks: groups, meshes, DDP, splits, recomputation."""

from __future__ import annotations

from datetime import timedelta
from typing import cast

import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket, HashStore, PrefixStore, Store, TCPStore
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    CheckpointWrapper,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn.parallel import DistributedDataParallel

__all__ = [
    "CheckpointImpl",
    "CheckpointWrapper",
    "GradBucket",
    "HashStore",
    "PrefixStore",
    "Store",
    "TCPStore",
    "TensorStyle",
    "apply_activation_checkpointing",
    "checkpoint_wrapper",
    "flat_group",
    "name_without_wrapper",
    "reduce_scatter",
    "reduce_unused",
    "release_ddp",
    "set_group_timeout",
    "wrapped_block",
]

# GradBucket and the stores: public in `torch.distributed`, which does not say so to mypy. Seen on 2.11, 2.13, 2.15.
# checkpoint_wrapper and its kin: a block that computes its activations again, and keeps its parameters' names in a state
# dict. Seen on 2.11, 2.13, 2.15.


def set_group_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """How long a collective of this group may take: a mesh's groups have ten minutes of their own over NCCL. Seen on 2.11 and
    2.13; 2.15 has a public `set_timeout`, and warns of the private one."""
    if hasattr(dist, "set_timeout"):
        dist.set_timeout(timeout, group)
    else:
        dist.distributed_c10d._set_pg_timeout(timeout, group)


def flat_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """One group of all ranks of a mesh of several axes. Seen on 2.11, 2.13, 2.15."""
    return mesh._flatten().get_group()


def reduce_scatter(own: Tensor, everything: Tensor, group: dist.ProcessGroup | None) -> None:
    """Each rank gets its part of the sum. 2.13 renames it and warns of the old name; 2.11 knows only that. Seen on 2.11, 2.13."""
    (getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor)(own, everything, group=group)


def reduce_unused(model: nn.Module) -> bool:
    """Units of `fully_shard` reduce zeros for parameters that got no gradient on this rank. False: this torch cannot do that by
    itself. Seen on 2.13; 2.11 has no such setting."""
    setting = getattr(model, "set_reduce_scatter_unused_params", None)
    if setting is not None:
        setting(True)
    return setting is not None


def release_ddp(model: DistributedDataParallel) -> None:
    """Before the process group goes. DDP's reducer would otherwise be the last to hold it, and end it while it holds Python's
    lock, on which the group's own thread may be waiting: a hang at exit, now and then. Seen on 2.11, 2.13, 2.15."""
    model.logger = None
    model.reducer = None  # type: ignore[assignment]


class TensorStyle(ParallelStyle):
    """How ranks share a module, for `parallelize_module`: PyTorch calls a private hook, which here has the name `split`.
    Seen on 2.11, 2.13, 2.15."""

    def split(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        raise NotImplementedError

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return self.split(module, device_mesh)


def wrapped_block(wrapper: CheckpointWrapper) -> nn.Module:
    """The block that `checkpoint_wrapper` was given. Seen on 2.11, 2.13, 2.15."""
    return cast(nn.Module, wrapper._checkpoint_wrapped_module)


def name_without_wrapper(name: str) -> str:
    """The name that a parameter or buffer had before its block was given to `checkpoint_wrapper`. Seen on 2.11, 2.13, 2.15."""
    return name.replace("_checkpoint_wrapped_module.", "")
