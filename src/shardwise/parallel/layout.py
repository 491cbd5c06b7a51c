"""Where each rank stands: which share of the data is its own, and with whom it shares a copy of the model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.compat.distributed import flat_group, set_group_timeout
from shardwise.errors import ConfigError
from shardwise.parallel.world import World

Axes = tuple[tuple[str, int], ...]
"""Names and sizes, outermost first; empty where every rank has a whole copy of the model."""


@dataclass(frozen=True)
class Layout:
    """The ranks as a grid. Its last axis has neighbouring ranks, which are those of one machine."""

    world: World
    axes: Axes

    def size(self, axis: str) -> int:
        return dict(self.axes).get(axis, 1)

    @property
    def data_size(self) -> int:
        """How many different shares of a global batch there are."""
        return copies_in(self.axes, self.world.size)

    @property
    def data_rank(self) -> int:
        return self.world.rank // self.size("tensor") % self.data_size

    @property
    def stage(self) -> int:
        return self.world.rank // (self.world.size // self.size("stage"))

    @property
    def counts(self) -> bool:
        """Whether sums of this rank count: of those that work on the same samples, one speaks for all."""
        return self.stage == self.size("stage") - 1 and self.world.rank % self.size("tensor") == 0

    @property
    def random_rank(self) -> int:
        """Ranks that hold the same activations, as those of a tensor group do, must drop the same ones."""
        return self.world.rank // self.size("tensor")

    @cached_property
    def mesh(self) -> DeviceMesh:
        names, sizes = zip(*self.axes, strict=True)
        mesh = init_device_mesh(self.world.device.type, sizes, mesh_dim_names=names)
        if self.world.timeout is not None:  # a mesh would have ten minutes of its own over NCCL (torch 2.13)
            for name in names:
                set_group_timeout(mesh.get_group(name), self.world.timeout)
        return mesh

    @property
    def sharding_mesh(self) -> DeviceMesh:
        return self.mesh["replicate", "shard"] if self.size("replicate") > 1 else self.mesh["shard"]

    @cached_property
    def copies(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same stage of the model; None: all ranks do."""
        if self.size("stage") == 1:
            return None
        return self._group_of([name for name, _ in self.axes if name != "stage"])

    @cached_property
    def data_group(self) -> dist.ProcessGroup | None:
        """The ranks that have different shares of a global batch, in the order of these; None: all ranks."""
        if self.size("stage") == self.size("tensor") == 1:
            return None
        return self._group_of([name for name, _ in self.axes if name not in ("stage", "tensor")])

    def _group_of(self, axes: list[str]) -> dist.ProcessGroup:
        """A collective: all ranks call it together."""
        return self.mesh[axes[0]].get_group() if len(axes) == 1 else flat_group(self.mesh[tuple(axes)])

    @property
    def first_copy(self) -> int:
        """The global rank of the first of them."""
        return self.stage * (self.world.size // self.size("stage"))


def copies_in(axes: Axes, ranks: int) -> int:
    """Of the model: those that share one, by its blocks or by its matrices, work on the same samples."""
    sizes = dict(axes)
    return ranks // (sizes.get("stage", 1) * sizes.get("tensor", 1))


def group_size(key: str, size: int, ranks: int) -> int:
    """Of the groups that `training.<key>` divides the ranks into; refused if it cannot."""
    if size < 2 or ranks % size:
        fits = [number for number in range(2, ranks + 1) if ranks % number == 0]
        hint = f"{ranks} ranks can be divided by {', '.join(map(str, fits))}" if fits else "it needs two ranks or more"
        raise ConfigError(f"training.{key}: {size} does not go with {ranks} rank(s): {hint}")
    return size
