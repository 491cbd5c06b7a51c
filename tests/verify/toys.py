"""Tasks that are wrong, or awkward, in one way each."""

from __future__ import annotations

from typing import Any

import numpy as np
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


class DrawsAnew(Ragged):
    """A data set with a generator of its own: the same index is another sample every time."""

    def train_data(self) -> list[Tensor]:
        return _Fresh(super().train_data())


class _Fresh(list[Tensor]):
    def __getitem__(self, index: Any) -> Any:
        return torch.from_numpy(np.random.default_rng().permutation(super().__getitem__(index).numpy()))


class MadeAnew(Ragged):
    """The data are made anew by every process, and within it always the same."""

    def train_data(self) -> list[Tensor]:
        generator = np.random.default_rng()
        return [torch.from_numpy(generator.permutation(each.numpy())) for each in super().train_data()]


class Watching(Ragged):
    """A running mean of a rank's own samples, which training does not look at."""

    looks = False

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.norm = _RunningMean(self.config.model.width, self.looks)
        return model


class Centring(Watching):
    """The same, and the forward pass takes it away from the samples."""

    looks = True


class _RunningMean(nn.Module):
    mean: Tensor

    def __init__(self, width: int, looks: bool) -> None:
        super().__init__()
        self.norm, self.looks = nn.LayerNorm(width), looks
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, hidden: Tensor) -> Tensor:
        result = self.norm(hidden - self.mean if self.looks else hidden)
        if self.training:
            self.mean = self.mean.lerp(hidden.detach().mean((0, 1)), 0.1)
        return result


class Frozen(Ragged):
    """Fine-tuning: some parameters are not trained."""

    def build_model(self) -> nn.Module:
        model: Any = super().build_model()
        model.layers[0].requires_grad_(False)
        return model
