"""Running statistics are those of the first rank wherever a model is evaluated and saved, in recomputed blocks too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise import Loss, Task
from tests.distributed import work
from tests.distributed.pool import RankPool

TEXT = "task: tests.distributed.test_running_buffers:Normed\ntraining: {batch_size: 4, max_steps: 2}\n"


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2))

    def forward(self, points: Tensor) -> Tensor:
        for layer in self.layers:
            points = layer(points)
        return points


class Normed(Task):
    """Batch norm in every block, which sees other samples on every rank."""

    def train_data(self) -> Any:
        return torch.randn(16, 4, generator=torch.Generator().manual_seed(0))

    def build_model(self) -> nn.Module:
        return Blocks()

    def loss(self, model: nn.Module, batch: Tensor) -> Loss:
        return Loss(model(batch).square().sum(), len(batch))


@pytest.mark.parametrize(
    "way", [["training.strategy=ddp"], ["training.fsdp={}"], ["training.fsdp.activation_checkpointing=true"]], ids=str
)
def test_running_statistics_are_the_first_ranks_after_they_are_shared(ranks: RankPool, way: list[str]) -> None:
    first, second = ranks.run(2, work.with_session, TEXT, way, _shared)
    assert len(first) == 6 and first == second


def _shared(session: Any) -> list[list[float]]:
    session.step(next(session.batches()))
    session.strategy.share_buffers()
    return [buffer.flatten().tolist() for _, buffer in session.strategy.module.named_buffers()]
