"""Tasks that are wrong, or awkward, in one way each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardwise.tasks import Loss
from tests.tasks import Ragged


class Normed(Ragged):
    """Nothing is wrong with it, but batch norm sees a rank's own samples."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.norm = _OverTokens(self.config.model.width)
        return model


class _OverTokens(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden.flatten(0, 1)).view(hidden.shape)


class Noisy(Ragged):
    """Draws noise in the forward pass, which no switch turns off."""

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        loss = super().loss(model, batch)
        return Loss(loss.sum * (1 + 0.1 * torch.rand(())), loss.count)


class Detached(Ragged):
    """A parameter that is used without its gradient."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.norm = _Detaching(self.config.model.width)
        return model


class _Detaching(nn.LayerNorm):
    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.layer_norm(hidden, hidden.shape[-1:], self.weight.detach(), self.bias)


class Mean(Ragged):
    """Returns a mean where a sum is asked for, and hides it from the check of counts."""

    def count(self, batch: dict[str, Tensor]) -> int:
        return 1

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        loss = super().loss(model, batch)
        return Loss(loss.sum / loss.count, 1)


class Overlapping(Ragged):
    """Validates on samples that it trains on."""

    def valid_data(self) -> list[Tensor]:
        return [*super().valid_data(), *self.train_data()[:3]]


class DrawsPerBatch(Ragged):
    """What is hidden depends on which samples stand together."""

    def collate(self, samples: list[Tensor]) -> dict[str, Tensor]:
        batch = super().collate(samples)
        hidden = torch.rand(batch["ids"].shape) < 0.3
        return {"ids": batch["ids"].masked_fill(hidden & (batch["ids"] >= 0), 0)}


class Frozen(Ragged):
    """Fine-tuning: some parameters are not trained."""

    def build_model(self) -> nn.Module:
        model: Any = super().build_model()
        model.layers[0].requires_grad_(False)
        return model
