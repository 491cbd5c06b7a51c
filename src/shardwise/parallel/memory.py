"""The bytes that each rank holds between steps and at its fullest, by arithmetic: weights, gradients, optimizer state.

Activations are not among them: they depend on the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from shardwise.config import Training


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


def state_bytes(sizes: ModelSizes, training: Training, strategy: str, ranks: int) -> StateBytes:
    """`strategy`: single, ddp, zero1, or a sharding strategy of fsdp over `ranks`."""
    wide = 2 if training.precision == "bf16-true" else 4
    narrow = 2 if training.precision in ("bf16-true", "bf16-mixed", "16-mixed") else 4
    moments = {"sgd": 1 if training.optimizer.momentum else 0}.get(training.optimizer.name, 2)
    weights, gradients, optimizer = sizes.parameters * wide, sizes.trained * wide, moments * sizes.trained * wide
    if strategy in ("single", "dp", "ddp", "NO_SHARD"):
        return StateBytes(weights, gradients, optimizer)
    if strategy == "zero1":
        return StateBytes(weights, gradients, optimizer / ranks)
    gathered = (
        sizes.parameters if strategy == "SHARD_GRAD_OP" else 2 * sizes.largest_block
    )  # one computes, one is ahead
    return StateBytes(weights / ranks, gradients / ranks, optimizer / ranks, gathered * narrow)


def gib(number: float) -> str:
    return f"{number / 2**30:.3g} GiB" if number >= 2**29 else f"{number / 2**20:.3g} MiB"
