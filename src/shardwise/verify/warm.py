"""Imported by the server that ranks are forked from, so that none of them has to import it again."""

from __future__ import annotations

import contextlib
import importlib
import os

import torch

import shardwise.verify.coverage
import shardwise.verify.probe
import shardwise.verify.rank  # noqa: F401

# The first step of any optimizer imports PyTorch's compiler, which takes seconds (torch 2.13).
torch.set_num_threads(1)
_weight = torch.nn.Parameter(torch.zeros(1))
_weight.grad = torch.zeros(1)
torch.optim.AdamW([_weight]).step()
torch.optim.SGD([_weight], lr=0.1).step()

# Whatever is wrong with the task, its rank will say so.
with contextlib.suppress(Exception):
    if module := os.environ.get("SHARDWISE_VERIFY_TASK"):
        importlib.import_module(module)
