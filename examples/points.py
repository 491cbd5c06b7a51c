"""A task of your own, in twenty lines. Train it with `shardwise train examples/points.yaml`."""

import torch
from torch import Tensor, nn

from shardwise import Block, DataBlock, Loss, Task


class Points(Task):
    """Learn the product of two numbers."""

    class Data(DataBlock):
        number: int = 500

    class Model(Block):
        width: int = 32

    def train_data(self) -> list[tuple[Tensor, Tensor]]:
        points = torch.rand(self.config.data.number, 2, generator=torch.Generator().manual_seed(self.config.seed))
        return [(x, x.prod(dim=0, keepdim=True)) for x in points]

    def build_model(self) -> nn.Module:
        width = self.config.model.width
        return nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 1))

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        x, y = batch
        return Loss(sum=(model(x) - y).square().sum(), count=len(x))
