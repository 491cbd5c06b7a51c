"""A loss that looks at the whole batch: pairs are told from each other, as CLIP does. `shardwise train examples/pairs.yaml`."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from shardwise import Block, DataBlock, Loss, Task, gather_batch


class Pairs(Task):
    """Two views of the same thing are to be found among the views of all others."""

    loss_is_a_sum = False  # each sample's loss depends on the others: gradient accumulation would be another loss

    class Data(DataBlock):
        number: int = 250

    class Model(Block):
        width: int = 16

    def train_data(self) -> list[tuple[Tensor, Tensor]]:
        return views(self.config.data.number, seed=self.config.seed)

    def valid_data(self) -> list[tuple[Tensor, Tensor]]:
        return views(29, seed=self.config.seed + 1)

    def build_model(self) -> nn.Module:
        return Towers(self.config.model.width)

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        left, right, scale = model(*batch)
        # This rank's rows against those of all ranks. Over all ranks, the sums add up to the loss of the whole batch.
        every_left, own = gather_batch(left)
        every_right, _ = gather_batch(right)
        place = torch.arange(own.start, own.stop, device=left.device)
        to_right = cross_entropy(scale * left @ every_right.T, place, reduction="sum")
        to_left = cross_entropy(scale * right @ every_left.T, place, reduction="sum")
        return Loss(sum=(to_right + to_left) / 2, count=len(left))


class Towers(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.left, self.right = tower(6, width), tower(4, width)
        self.log_scale = nn.Parameter(torch.ones(1))

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return normalize(self.left(left), dim=-1), normalize(self.right(right), dim=-1), self.log_scale.exp()


def tower(inputs: int, width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def views(number: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    world = torch.Generator().manual_seed(0)
    to_left, to_right = torch.randn(3, 6, generator=world), torch.randn(3, 4, generator=world)
    things = torch.randn(number, 3, generator=torch.Generator().manual_seed(seed))
    return list(zip((things @ to_left).tanh(), (things @ to_right).sin(), strict=True))
