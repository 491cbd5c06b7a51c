"""A forward pass of nothing through a Transformers model on the meta device, to see what it does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def without_values(config: Any, **settings: Any) -> Iterator[None]:
    """Within it, the model of this config computes without gradients, with these settings, and does not look at its tokens:
    where padding has a number, GPT-2 and others search them for it, to warn. Afterwards the config is as it was."""
    settings = {"pad_token_id": None, **settings}
    before = {name: getattr(config, name, None) for name in settings}
    for name, value in settings.items():
        setattr(config, name, value)
    try:
        with torch.no_grad():
            yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)
