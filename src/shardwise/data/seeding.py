"""Seeding the usual generators from a key, so that a resumed run draws what the uninterrupted one would have."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def seed_everything(*key: int) -> None:
    """Seed every generator that a model may draw from, those of the devices included. The key says what for."""
    first, second = np.random.SeedSequence(key).generate_state(2)
    random.seed(int(first))
    np.random.seed(first)
    torch.manual_seed(int(second))


@contextmanager
def seeded(*key: int) -> Iterator[None]:
    """Whatever is drawn on the host in here follows from the key; the generators are left as they were."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    first, second = np.random.SeedSequence(key).generate_state(2)
    random.seed(int(first))
    np.random.seed(first)
    torch.default_generator.manual_seed(int(second))
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
