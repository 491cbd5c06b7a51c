"""Tensor parallelism: the ranks of a group hold a part of every large matrix each, and compute on the same samples."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import parallelize_module

from shardwise.config import Training
from shardwise.errors import ConfigError
from shardwise.parallel.layout import Layout

TensorPlan = Callable[[nn.Module, int, bool], Mapping[str, Any] | None]
"""(model, ranks, sequence parallel) → how each module is split, by name; None where the task cannot say."""


def split_matrices(model: nn.Module, plan: TensorPlan, training: Training, layout: Layout) -> None:
    ranks = layout.size("tensor")
    styles = plan(model, ranks, bool(training.tensor and training.tensor.sequence_parallel))
    if styles is None:
        raise ConfigError(
            "strategy tensor: this task or model does not say how its matrices are split (Task.tensor_plan). The nearest "
            "that works is strategy: fsdp, which splits any model"
        )
    # It warns about every collective over two axes (torch 2.13): norms and checkpoints need them.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    parallelize_module(model, layout.mesh["tensor"], dict(styles))
