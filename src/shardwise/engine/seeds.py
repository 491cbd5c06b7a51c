"""Seeds as functions of (seed, purpose, …), so that a resumed run draws what the uninterrupted one would have."""

from __future__ import annotations

import random

import numpy as np
import torch

WEIGHTS, STEP = 1, 2


def seed_everything(*key: int) -> None:
    """Seed every generator that a model may draw from. The key says what for."""
    first, second = np.random.SeedSequence(key).generate_state(2)
    random.seed(int(first))
    np.random.seed(first)
    torch.manual_seed(int(second))
