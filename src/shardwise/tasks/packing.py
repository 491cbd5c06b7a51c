"""What tasks that pack their samples decide alike: whether to, and which attention to prefer where they do not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from shardwise.config import Training
from shardwise.data.cache import cache_folder
from shardwise.errors import ConfigError
from shardwise.kernels.types import COMPUTE_TYPES
from shardwise.parallel import strategy_for


def on_cuda(training: Training) -> bool:
    return training.device == "cuda" or (training.device == "auto" and torch.cuda.is_available())


def decide_packing(wanted: Any, *, cuda: bool, problem: Callable[[], str]) -> bool:
    """`wanted`: true, false or auto, which packs on CUDA. `problem`: what speaks against it, asked where that matters."""
    if wanted is False or (wanted == "auto" and not cuda):
        return False
    against = problem()
    if wanted is True and against:
        raise ConfigError(f"tokenizer.packing: true, but {against}. Leave it out, or set it to false")
    return not against


def strategy_against_packing(config: Any, samples: str) -> str:
    return strategy_for(config, 1).packing_problem(samples)


def computes_in(training: Training) -> torch.dtype:
    return COMPUTE_TYPES.get(training.precision, torch.float32)


def measured_attention() -> Path:
    """Where the fastest kernels are remembered."""
    return cache_folder() / "attention.json"
