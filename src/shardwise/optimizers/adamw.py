"""AdamW: weights decay beside the gradient's step."""

from __future__ import annotations

import torch

from shardwise.optimizers.adam import Adam


class AdamW(Adam):
    name = "adamw"
    kind = torch.optim.AdamW
