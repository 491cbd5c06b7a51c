"""The bytes that each rank holds between steps and at its fullest, by arithmetic: weights, gradients, optimizer state.

Activations are not among them: they depend on the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from shardwise.config import Training
from shardwise.optimizers import update_rule


@dataclass(frozen=True)
class ModelSizes:
    parameters: int
    trained: int
    """Of those, the ones that get gradients."""
    largest_block: int
    """Parameters of the largest unit of sharding."""

    @classmethod
    def of(cls, model: nn.Module, blocks: list[nn.Module]) -> ModelSizes:
        parameters = sum(parameter.numel() for parameter in model.parameters())
        sizes = [sum(parameter.numel() for parameter in block.parameters()) for block in blocks]
        outside = parameters - sum(sizes)
        trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        return cls(parameters, trained, max([outside, *sizes]))


@dataclass(frozen=True)
class StateBytes:
    weights: float
    gradients: float
    optimizer: float
    gathered: float = 0.0
    """Weights of others that a rank holds for a moment while it computes with them."""

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.gathered


@dataclass(frozen=True)
class Shortage:
    """A run that does not fit into a device's memory."""

    sizes: ModelSizes
    ranks: int
    missing: float
    """Bytes, at least."""
    state: float
    """Bytes of weights, gradients and optimizer state that were measured on the device."""


@dataclass(frozen=True)
class Remedy:
    what: str
    """What to write into the file."""
    saves: float
    """Bytes on this rank, estimated."""


def whole_copy(sizes: ModelSizes, training: Training) -> StateBytes:
    """On a device that has all of the model."""
    wide = 2 if training.precision == "bf16-true" else 4
    moments = update_rule(training.optimizer).moments
    return StateBytes(sizes.parameters * wide, sizes.trained * wide, moments * sizes.trained * wide)


def compute_bytes(training: Training) -> int:
    """Of one number that the model computes with."""
    return 2 if training.precision in ("bf16-true", "bf16-mixed", "16-mixed") else 4


def gib(number: float) -> str:
    return f"{number / 2**30:.3g} GiB" if number >= 2**29 else f"{number / 2**20:.3g} MiB"


def short_bytes(number: float) -> str:
    return f"{number / 2**20:.3g} MiB" if number >= 2**19 else f"{number / 2**10:.3g} KiB"
