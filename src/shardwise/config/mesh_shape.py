"""How many ranks stand along which axis, by arithmetic alone.

fsdp        [replicate ×] shard
pipeline    stage × [replicate ×] shard, or stage × replicate
tensor      [replicate ×] shard × tensor
"""

from __future__ import annotations

from shardwise.config.schema import Config, Fsdp, Training
from shardwise.errors import ConfigError

Axes = tuple[tuple[str, int], ...]
"""Names and sizes, outermost first; empty where every rank has a whole copy of the model."""


def copies_on(config: Config, ranks: int) -> int:
    """Among how many copies of the model this many ranks share a global batch."""
    return copies_in(axes_of(config.strategy_on(ranks), config.training, ranks), ranks)


def copies_in(axes: Axes, ranks: int) -> int:
    sizes = dict(axes)
    return ranks // (sizes.get("stage", 1) * sizes.get("tensor", 1))


def axes_of(strategy: str, training: Training, ranks: int) -> Axes:
    """The last axis has neighbouring ranks, which are those of one machine."""
    if strategy == "pipeline":
        stages = _size("pipeline.stages", training.pipeline.stages if training.pipeline else None, ranks, ranks)
        copies = ranks // stages
        inner = _sharding_axes(training.fsdp, copies, training) if training.fsdp else (("replicate", copies),)
        return (("stage", stages), *inner)
    if strategy == "tensor":
        machine = max(1, ranks // training.num_nodes)
        size = _size("tensor.size", training.tensor.size if training.tensor else None, machine, ranks)
        return (*_sharding_axes(training.fsdp or Fsdp(), ranks // size, training), ("tensor", size))
    if strategy == "fsdp":
        return _sharding_axes(training.fsdp or Fsdp(), ranks, training)
    return ()


def _size(key: str, wanted: int | None, default: int, ranks: int) -> int:
    size = wanted or default
    if size < 2 or ranks % size:
        fits = [number for number in range(2, ranks + 1) if ranks % number == 0]
        hint = f"{ranks} ranks can be divided by {', '.join(map(str, fits))}" if fits else "it needs two ranks or more"
        raise ConfigError(f"training.{key}: {size} does not go with {ranks} rank(s): {hint}")
    return size


def _sharding_axes(fsdp: Fsdp, ranks: int, training: Training) -> Axes:
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
