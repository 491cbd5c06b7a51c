"""What a step needs, built once by Session.prepare."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from shardwise.checkpoint.state import local_part
from shardwise.compat.modules import updates_unless_inf
from shardwise.config import Config
from shardwise.engine.precision import Precision
from shardwise.engine.schedule import Schedule
from shardwise.parallel import Strategy, World
from shardwise.tasks import Task


@dataclass
class Parts:
    config: Config
    task: Task
    world: World
    strategy: Strategy
    """With the model that it has laid over the ranks."""
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    precision: Precision
    scaler: torch.amp.GradScaler

    @property
    def parameters(self) -> list[nn.Parameter]:
        """In the optimizer's order, in which norms are added up."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def set_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    @cached_property
    def runs_ahead(self) -> bool:
        """Whether the host goes on while the device computes: where nothing but "not finite" can keep a step from being
        made, and PyTorch's optimizer can look at that by itself."""
        training = self.config.training
        if self.world.device.type != "cuda" or not self.strategy.runs_ahead or self.scaler.is_enabled():
            return False
        able = updates_unless_inf(local_part(self.optimizer))
        return able and not training.watches_loss and not training.may_skip
