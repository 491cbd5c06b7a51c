"""Where each rank stands: which share of the data is its own, and with whom it shares a copy of the model.

fsdp        [replicate ×] shard
pipeline    stage × [replicate ×] shard, or stage × replicate
tensor      [replicate ×] shard × tensor
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.config import Fsdp, Training
from shardwise.errors import ConfigError
from shardwise.parallel.world import World


@dataclass(frozen=True)
class Layout:
    """The ranks as a grid. Its last axis has neighbouring ranks, which are those of one machine."""

    world: World
    axes: tuple[tuple[str, int], ...]
    """Names and sizes, outermost first; empty where every rank has a whole copy of the model."""

    @classmethod
    def of(cls, strategy: str, training: Training, world: World) -> Layout:
        if strategy == "pipeline":
            stages = _size(
                "pipeline.stages", training.pipeline.stages if training.pipeline else None, world.size, world
            )
            copies = world.size // stages
            inner = _sharding_axes(training.fsdp, copies, training) if training.fsdp else (("replicate", copies),)
            return cls(world, (("stage", stages), *inner))
        if strategy == "tensor":
            machine = max(1, world.size // training.num_nodes)
            size = _size("tensor.size", training.tensor.size if training.tensor else None, machine, world)
            return cls(
                world, (*_sharding_axes(training.fsdp or Fsdp(), world.size // size, training), ("tensor", size))
            )
        if strategy == "fsdp":
            return cls(world, _sharding_axes(training.fsdp or Fsdp(), world.size, training))
        return cls(world, ())

    def size(self, axis: str) -> int:
        return dict(self.axes).get(axis, 1)

    @property
    def data_size(self) -> int:
        """How many different shares of a global batch there are."""
        return self.world.size // (self.size("stage") * self.size("tensor"))

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
        return init_device_mesh(self.world.device.type, sizes, mesh_dim_names=names)

    @property
    def sharding_mesh(self) -> DeviceMesh:
        return self.mesh["replicate", "shard"] if self.size("replicate") > 1 else self.mesh["shard"]

    @cached_property
    def copies(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same stage of the model; None: all ranks do."""
        if self.size("stage") == 1:
            return None
        axes = [name for name, size in self.axes if name != "stage"]
        return self.mesh[axes[0]].get_group() if len(axes) == 1 else self.mesh[tuple(axes)]._flatten().get_group()

    @property
    def first_copy(self) -> int:
        """The global rank of the first of them."""
        return self.stage * (self.world.size // self.size("stage"))


def _size(key: str, wanted: int | None, default: int, world: World) -> int:
    size = wanted or default
    if size < 2 or world.size % size:
        fits = [number for number in range(2, world.size + 1) if world.size % number == 0]
        hint = (
            f"{world.size} ranks can be divided by {', '.join(map(str, fits))}"
            if fits
            else "it needs two ranks or more"
        )
        raise ConfigError(f"training.{key}: {size} does not go with {world.size} rank(s): {hint}")
    return size


def _sharding_axes(fsdp: Fsdp, ranks: int, training: Training) -> tuple[tuple[str, int], ...]:
    if fsdp.sharding_strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
        return (("shard", ranks),)
    if fsdp.sharding_strategy == "NO_SHARD":
        return (("replicate", ranks), ("shard", 1))
    if fsdp.shard_size is None and ranks % training.num_nodes:
        raise ConfigError(f"HYBRID_SHARD: {ranks} ranks do not divide evenly over num_nodes: {training.num_nodes}")
    shard = fsdp.shard_size or ranks // training.num_nodes  # ranks of a machine are numbered side by side
    if ranks % shard:
        raise ConfigError(f"training.fsdp.shard_size: {shard} does not divide the {ranks} ranks that share the model")
    return (("replicate", ranks // shard), ("shard", shard))
