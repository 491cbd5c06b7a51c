"""What strategies say of themselves to somebody who has a model and machines, and must choose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.parallel.memory import ModelSizes, StateBytes


@dataclass(frozen=True)
class Machines:
    devices: int
    """In total."""
    nodes: int
    memory: float
    """Bytes per device."""
    slow_network: bool = False
    """Between the machines."""

    @property
    def per_node(self) -> int:
        return self.devices // self.nodes


@dataclass(frozen=True)
class Question:
    sizes: ModelSizes
    machines: Machines
    tensor_sizes: Sequence[int]
    """How many devices of a machine may share every matrix."""


@dataclass(frozen=True)
class Suggestion:
    name: str
    lines: list[str]
    """What to write into the block `training`."""
    held: StateBytes | None = None
    """On each device, by arithmetic. None: a way out where nothing else fits."""
    order: int = 0
    """Its place among the others, from the plainest to the one that needs least memory."""
    preferred: int | None = 0
    """Which is taken of those that fit: the lowest. None: only if it is the plainest."""
    why: str = ""
    """For it, if it is taken."""
    lines_if_tight: list[str] | None = None
    """What to write if nothing else fits."""
    splits_blocks: bool = False
    """A way out where one block alone does not fit."""
