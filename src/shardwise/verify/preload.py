"""Imported by the server that the ranks of the proof are forked from, besides what every rank needs."""

from __future__ import annotations

import torch

import shardwise.launch.preload
import shardwise.verify.coverage
import shardwise.verify.probe
import shardwise.verify.rank  # noqa: F401

torch.set_num_threads(1)
