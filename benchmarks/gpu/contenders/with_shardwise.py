"""shardwise: a config, a Session and its loop."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import yaml

from benchmarks.gpu.contenders.meter import Meter
from benchmarks.gpu.contenders.problem import CLIP, DEVICE, LEARNING_RATE, SEED, WEIGHT_DECAY
from shardwise import Session
from shardwise.config import parse_config
from shardwise.engine.step_result import StepResult


def train(
    blocks: dict[str, Any],
    training: dict[str, Any],
    units: Callable[[StepResult], float],
    meter: Meter,
    overrides: Sequence[str] = (),
) -> None:
    """`blocks`: the config without its block `training`, of which `training` holds what differs from the usual."""
    usual = {
        "strategy": "single",
        "precision": "bf16-mixed",
        "gradient_clip": CLIP,
        "max_steps": meter.plan.total,
        "optimizer": {"name": "adamw", "lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY},
        "scheduler": {"name": "constant"},
        "compile": "auto" if DEVICE.type == "cpu" else True,  # auto is that in runs of 200 steps and more
        "async_checkpoint": False,  # none is written: no memory is taken for it
    }
    with tempfile.TemporaryDirectory() as folder:
        config = parse_config(
            yaml.safe_dump({**blocks, "seed": SEED, "run_dir": folder, "training": usual | training}), overrides
        )
        with Session(config) as session:
            session.prepare()
            meter.ready()
            for batch in session.batches():
                result = session.step(batch)
                meter.done(partial(_loss, result), units(result))


def _loss(result: StepResult) -> float:
    return result.loss_sum / result.count
