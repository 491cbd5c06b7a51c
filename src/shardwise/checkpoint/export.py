"""Trained weights for use elsewhere."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from shardwise.checkpoint.state import load_model
from shardwise.data.manifest import read_manifest
from shardwise.errors import CheckpointError
from shardwise.parallel.weights import build_shape, materialize
from shardwise.tasks import Task

log = logging.getLogger(__name__)

TRIES = 5
"""A run that is going on may remove as many checkpoints, one after the other, while they are read."""
Choice = Callable[[], tuple[Path, list[str]]]
"""Which checkpoint, and a sentence about each that is passed over for it."""


def export_one(task: Task, choose: Choice, folder: Path) -> Path:
    """The checkpoint that is chosen, into a new folder. Returns which it was. Where its run removes or replaces it while it is
    read, another is chosen."""
    for _ in range(TRIES):
        checkpoint, complaints = choose()
        before = _number(checkpoint)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        try:
            export_checkpoint(task, checkpoint, folder)
        except (OSError, ValueError, CheckpointError):
            if _number(checkpoint) == before:
                raise
        if before is not None and _number(checkpoint) == before:
            for complaint in complaints:
                log.warning(complaint)
            return checkpoint
        log.info(f"{checkpoint} was removed while it was read, by the run that is going on: another is taken")
    raise CheckpointError(
        f"{checkpoint}, and {TRIES - 1} before it, were removed while they were read: the run that is going on saves faster than "
        "this reads. Export when it has ended, or let it keep more of them: training.keep_last"
    )


def _number(folder: Path) -> tuple[int, int] | None:
    """Of a folder; another that takes its place has another one."""
    try:
        about = folder.stat()
    except OSError:
        return None
    return about.st_dev, about.st_ino


def export_checkpoint(task: Task, checkpoint: Path, folder: Path) -> None:
    """In one process, whatever strategy wrote the checkpoint: shards are put together as they are read."""
    task.trained_labels = list(read_manifest(checkpoint)["about"].get("labels") or ())
    model = materialize(build_shape(task.build_model), torch.device("cpu"))
    load_model(model, checkpoint)
    task.export(model, folder)
