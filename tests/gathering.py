"""Tasks whose loss looks at the whole batch, in double precision: what ranks compute must be what one process does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn.functional import cross_entropy, normalize, one_hot

from shardwise import DataBlock, Loss, Rows, Task, gather_batch


class Number(DataBlock):
    samples: int = Field(29, ge=1, description="A number that divides by nothing.")


class Contrast(Task):
    """Each sample is told from all others of the batch; every fifth one has no second view, so rows are uneven."""

    Data = Number
    loss_is_a_sum = False

    def train_data(self) -> list[tuple[Tensor, Tensor, bool]]:
        return self._samples(self.config.data.samples, seed=1)

    def valid_data(self) -> list[tuple[Tensor, Tensor, bool]]:
        return self._samples(17, seed=2)

    def _samples(self, number: int, seed: int) -> list[tuple[Tensor, Tensor, bool]]:
        generator = torch.Generator().manual_seed(seed)
        left, right = (torch.randn(number, 6, generator=generator, dtype=torch.float64) for _ in range(2))
        return [(left[n], right[n], n % 5 > 0) for n in range(number)]

    def build_model(self) -> nn.Module:
        return Towers().double()

    def count(self, batch: Any) -> int:
        return int(batch[2].sum())

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        left, right, whole = batch
        one, other = (features[whole] for features in model(left, right))
        every_one, own = gather_batch(one)
        every_other, _ = gather_batch(other)
        place = torch.arange(own.start, own.stop)
        there = cross_entropy(5 * one @ every_other.T, place, reduction="sum")
        back = cross_entropy(5 * other @ every_one.T, place, reduction="sum")
        return Loss(there + back, whole.sum())

    def tensor_plan(self, model: nn.Module, ranks: int, sequence_parallel: bool) -> Mapping[str, Any]:
        return {
            "blocks.*.0": ColwiseParallel(),
            "blocks.*.2": RowwiseParallel(),
        }


class WholeLoss(Contrast):
    """The loss of the whole batch on every rank, times the rank's own count: no part of it belongs to a rank."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        left, right, whole = batch
        one, other = (gather_batch(features[whole]).rows for features in model(left, right))
        off_diagonal = (one.T @ other / max(1, len(one))).square().sum() - (one * other).sum() ** 2 / 7
        return Loss(off_diagonal * whole.sum(), whole.sum())


class Apart(Contrast):
    """No sum over samples, and nothing is gathered: on each rank and micro-batch it is the loss of what is there."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        left, right, whole = batch
        one, other = (features[whole] for features in model(left, right))
        return Loss(cross_entropy(5 * one @ other.T, torch.arange(len(one)), reduction="sum"), whole.sum())


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6)) for _ in range(2))

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        return normalize(self.blocks[0](left), dim=-1), normalize(self.blocks[1](right), dim=-1)


class Chain(Contrast):
    """One tower for both, which a pipeline can cut."""

    def build_model(self) -> nn.Module:
        return Tower().double()

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        features = model(batch[0])
        rows = gather_batch(features).rows
        return Loss((features @ rows.T).square().sum(), batch[2].sum())


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


class Experts(Task):
    """Experts whose loads are balanced over the whole batch, by a gather within the blocks of the model."""

    Data = Number
    loss_is_a_sum = False

    def train_data(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(3)
        return list(torch.randn(self.config.data.samples, 6, generator=generator, dtype=torch.float64))

    def build_model(self) -> nn.Module:
        return ExpertModel().double()

    def loss(self, model: nn.Module, batch: Tensor) -> Loss:
        hidden, balance = model(batch)
        return Loss((hidden - batch.roll(1, -1)).square().sum() + balance * len(batch), len(batch))


class ExpertModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ExpertBlock() for _ in range(2))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        balance = hidden.new_zeros(())
        for block in self.blocks:
            hidden, more = block(hidden)
            balance = balance + more
        return hidden, balance


class ExpertBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, 3)
        self.experts = nn.Linear(6, 18)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        shares = self.router(hidden).softmax(-1)
        chosen = one_hot(shares.argmax(-1), 3).to(shares)
        # What each rank has of them, added up over the ranks: sums and a count, never means.
        mine = torch.cat([shares.sum(0), chosen.sum(0), shares.new_tensor([len(hidden)])])
        total = gather_batch(mine[None]).rows.sum(0)
        balance = 3 * (total[:3] * total[3:6]).sum() / total[6] ** 2
        mixed = (self.experts(hidden).unflatten(-1, (3, 6)) * (shares * chosen)[..., None]).sum(-2)
        return hidden + mixed, balance


class Retrieval(Contrast):
    """Evaluated on rows that are gathered, too."""

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, Loss | Rows]:
        left, right, _ = batch
        one, other = model(left, right)
        every, own = gather_batch(other)
        found = (one @ every.T).argmax(-1) == torch.arange(own.start, own.stop)
        return {"loss": self.loss(model, batch), "found": Loss(found.sum(), len(found))}
