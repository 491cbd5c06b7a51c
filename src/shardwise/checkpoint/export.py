"""Trained weights for use elsewhere."""

from __future__ import annotations

from pathlib import Path

import torch

from shardwise.checkpoint.state import load_model
from shardwise.data.manifest import read_manifest
from shardwise.parallel.weights import build_shape, materialize
from shardwise.tasks import Task


def export_checkpoint(task: Task, checkpoint: Path, folder: Path) -> None:
    """In one process, whatever strategy wrote the checkpoint: shards are put together as they are read."""
    task.trained_labels = list(read_manifest(checkpoint)["about"].get("labels") or ())
    model = materialize(build_shape(task.build_model), torch.device("cpu"))
    load_model(model, checkpoint)
    task.export(model, folder)
