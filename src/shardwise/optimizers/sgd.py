"""Stochastic gradient descent, with momentum or without."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from shardwise.optimizers.rule import UpdateRule, fused, sharded


class Sgd(UpdateRule):
    name = "sgd"
    kind = torch.optim.SGD

    def settings(self, parameters: Sequence[nn.Parameter]) -> dict[str, Any]:
        # Its fused kind cannot take sharded parameters (torch 2.13).
        return {"momentum": self.options.momentum, "fused": None if sharded(parameters) else fused(parameters)}

    @property
    def moments(self) -> int:
        return 1 if self.options.momentum else 0
