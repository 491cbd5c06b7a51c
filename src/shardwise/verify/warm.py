"""Imported by the server that ranks are forked from, so that none of them has to import it again."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os

import torch

import shardwise.verify.coverage
import shardwise.verify.probe
import shardwise.verify.rank  # noqa: F401
from shardwise.config import load_config
from shardwise.config.load import make_task

torch.set_num_threads(1)

# The first step of any optimizer imports PyTorch's compiler, which takes seconds (torch 2.13).
_weight = torch.nn.Parameter(torch.zeros(1))
_weight.grad = torch.zeros(1)
torch.optim.AdamW([_weight]).step()
torch.optim.SGD([_weight], lr=0.1).step()

# So do the first save of a tensor, and of a checkpoint, which looks for fsspec (torch 2.13), in tenths of a second.
torch.save(_weight, io.BytesIO())
with contextlib.suppress(ImportError):
    importlib.import_module("torch.distributed.checkpoint._fsspec_filesystem")

# So does much of a library that imports a model's code when the model is built: a task that comes with shardwise is built
# once, on no device. Whatever is wrong with it, its rank will say so.
with contextlib.suppress(Exception):
    if rehearsed := json.loads(os.environ.get("SHARDWISE_VERIFY_REHEARSED", "[]")):
        _task = make_task(load_config(rehearsed[0], rehearsed[1:]))
        with torch.device("meta"):
            _task.build_model()
        del _task
