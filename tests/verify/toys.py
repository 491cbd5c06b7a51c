"""Tasks that are wrong, or awkward, in one way each."""

from __future__ import annotations

import os
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import get_worker_info

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


class Rare(Ragged):
    """One of the 53 samples trains a parameter that the others do not use."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.embedding = _ForOne(model.embedding)
        return model

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return []


class _ForOne(nn.Module):
    def __init__(self, embedding: Any) -> None:
        super().__init__()
        self.weight, self.bonus = embedding.weight, nn.Parameter(torch.ones(1))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = nn.functional.embedding(ids, self.weight)
        rare = ids[:, :1, None] == 26
        return torch.where(rare, hidden * self.bonus, hidden) if rare.any() else hidden


class Late(Ragged):
    """A layer is made by the first forward pass that has an odd number of tokens in a row."""

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        plain: Any = getattr(model, "module", model)  # below DDP
        if model.training and batch["ids"].shape[1] % 2 and not hasattr(plain, "late"):
            plain.late = nn.Linear(1, 1)
        return super().loss(model, batch)


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


# ---------------------------------------------------------------- data that each rank makes otherwise


class FromASet(Ragged):
    """Tokens are numbered in the order of a set of words, which is each process's own."""

    def train_data(self) -> list[Tensor]:
        numbers = {word: number for number, word in enumerate({f"word {number}" for number in range(self.vocabulary)})}
        order = torch.tensor([numbers[f"word {number}"] for number in range(self.vocabulary)])
        return [order[each] for each in super().train_data()]


class FromAFolder(Ragged):
    """Samples come in the order in which a folder gives its files."""

    def train_data(self) -> list[Tensor]:
        data = super().train_data()
        with TemporaryDirectory() as folder:
            for number, each in enumerate(data):
                torch.save(each, Path(folder) / f"{number}.pt")
            return [torch.load(file) for file in Path(folder).iterdir()]


class SlowAndByRank(Ragged):
    """Takes so long to make that it is made once for most runs; and every rank adds something of its own."""

    def train_data(self) -> list[Tensor]:
        time.sleep(1.2)
        return [(each + int(os.environ["RANK"])) % self.vocabulary for each in super().train_data()]


class ByThreads(Ragged):
    """As many readers as there are threads take turns with the samples."""

    def train_data(self) -> list[Tensor]:
        data, readers = super().train_data(), torch.get_num_threads()
        return [each for first in range(readers) for each in data[first::readers]]


class ByWorker(Ragged):
    """Every loader worker adds its number to what it reads."""

    def train_data(self) -> list[Tensor]:
        return _Numbered(super().train_data())


class _Numbered(list[Tensor]):
    def __getitem__(self, index: Any) -> Any:
        worker = get_worker_info()
        return (super().__getitem__(index) + (worker.id if worker else 0)) % Ragged.vocabulary


class HeldOutInAnotherType(Ragged):
    """Validates on samples that it trains on, which it reads as other numbers."""

    def valid_data(self) -> list[Tensor]:
        return [each.to(torch.int32) for each in self.train_data()[:11]]

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        return super().loss(model, {"ids": batch["ids"].long()})


class LeavingOut(Ragged):
    """What is much longer than the others of a micro-batch is left out of it."""

    def collate(self, samples: list[Tensor]) -> dict[str, Tensor]:
        usual = sum(map(len, samples)) / len(samples)
        return super().collate([each for each in samples if len(each) <= 1.3 * usual])


# ---------------------------------------------------------------- evaluation


class Remembering(Ragged):
    """What it has once found for a sample is found for ever after."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.known: dict[bytes, Loss] = {}

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        return {"loss": self.known.setdefault(batch["ids"].numpy().tobytes(), self.loss(model, batch))}


class Freezing(Ragged):
    """Freezes the first block to evaluate it, and forgets to set it free."""

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        next(model.parameters()).requires_grad_(False)
        return {**super().evaluate(model, batch)}


class Switching(Ragged):
    """Evaluates without smoothing, by a switch that stays off."""

    smoothing = 0.3

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        loss = super().loss(model, batch)
        return Loss(loss.sum * (1 - self.smoothing), loss.count)

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        self.smoothing = 0.0
        return {**super().evaluate(model, batch)}


class Reseeding(Ragged):
    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        torch.manual_seed(0)
        return {**super().evaluate(model, batch)}


class CountedOnRankZero(Ragged):
    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        loss: Any = super().evaluate(model, batch)["loss"]
        mine = int(os.environ["RANK"] == "0")
        return {"loss": loss, "bits": Loss(loss.sum * 1.4427 * mine, loss.count * mine)}


class MeanOfMicroBatches(Ragged):
    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        loss: Any = super().evaluate(model, batch)["loss"]
        return {"loss": loss, "bits": Loss(loss.sum / loss.count * 1.4427, 1)}


class AddingUp(Ragged):
    """A metric that is never set to zero."""

    total = 0.0

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        loss: Any = super().evaluate(model, batch)["loss"]
        self.total += float(loss.sum)
        return {"loss": loss, "all": Loss(torch.tensor(self.total), loss.count)}


class Looking(Ragged):
    """Keeps the last validation batch for a picture: nothing is wrong with that. It draws, too."""

    last: Any = None

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        self.last = batch
        torch.rand(3)
        return {**super().evaluate(model, batch)}


# ---------------------------------------------------------------- state, and what begins late


class MaxNorm(Ragged):
    """Rows of the embedding that are looked up are cut to a norm in the forward pass."""

    def build_model(self) -> nn.Module:
        model: Any = super().build_model()
        model.embedding.max_norm = 0.1
        return model


class ClampingHook(Ragged):
    """A hook cuts the gradient of one matrix, of each micro-batch on its own."""

    def build_model(self) -> nn.Module:
        model: Any = super().build_model()
        model.layers[0].inner[1].weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        return model


class Normalising(Ragged):
    """The loss is divided by a running mean of itself, in an attribute of the task."""

    mean = 1.0

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        loss = super().loss(model, batch)
        self.mean = 0.9 * self.mean + 0.1 * float(loss.sum.detach() / loss.count)
        return Loss(loss.sum / self.mean, loss.count)


class Counting(Ragged):
    """Counts its calls, which no number depends on."""

    calls = 0

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        self.calls += 1
        return super().loss(model, batch)


class RareMean(Ragged):
    """Where a rare sample is in the micro-batch, the loss is its mean times eight. The first step has none."""

    rare = 28
    """A token that few sequences begin with."""

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        loss = super().loss(model, batch)
        if bool((batch["ids"][:, 0] == self.rare).any()):
            return Loss(loss.sum / loss.count * 8, loss.count)
        return loss


class WithReplacement(Ragged):
    """The data set draws which sample it gives."""

    def train_data(self) -> list[Tensor]:
        return _Drawing(super().train_data())


class _Drawing(list[Tensor]):
    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(int(torch.randint(len(self), ())))


class EveryOther(Ragged):
    """A mistake in the index: half of the samples never come, the others twice."""

    def train_data(self) -> list[Tensor]:
        data = super().train_data()
        return [data[index // 2 * 2] for index in range(len(data))]
