"""Adam: weight decay is a part of the gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from shardwise.optimizers.rule import UpdateRule


class Adam(UpdateRule):
    name = "adam"
    kind: ClassVar[type[torch.optim.Optimizer]] = torch.optim.Adam

    def settings(self, parameters: Sequence[nn.Parameter]) -> dict[str, Any]:
        first, second = self.options.betas
        return {"betas": (first, second), "eps": self.options.eps, **super().settings(parameters)}
