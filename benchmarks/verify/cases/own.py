"""What the loops of this folder have in common: a config, a model, data and a loss, all correct."""

from __future__ import annotations

import torch.nn.functional as F
from plain import Mlp, points
from torch import Tensor, nn

from shardwise import Loss
from shardwise.config import Config, parse_config

CONFIG = """
task: own
name: {name}
training:
  device: cpu
  batch_size: 8
  max_epochs: 3
  strategy: ddp
  gradient_clip: 1.0
  optimizer: {{lr: {lr}}}
"""


def config(name: str, lr: float = 0.01) -> Config:
    return parse_config(CONFIG.format(name=name, lr=lr))


def data() -> list[tuple[Tensor, Tensor]]:
    return list(zip(*points(0, 240), strict=True))


def valid() -> list[tuple[Tensor, Tensor]]:
    return list(zip(*points(1000, 52), strict=True))


def model() -> nn.Module:
    return Mlp()


def loss(model: nn.Module, batch: list[Tensor]) -> Loss:
    return Loss(sum=F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), count=len(batch[0]))
