"""Imported by the server that ranks are forked from, so that none of them has to import it again."""

from __future__ import annotations

import contextlib
import io
import json
import os

from shardwise.launch.server import LAUNCHER, REHEARSED, block_stop_signals, die_with

# The ranks hold the pipe by which the server would notice that its launcher is gone, so the kernel has to see to it.
if _launcher := os.environ.pop(LAUNCHER, None):
    die_with(int(_launcher))
    block_stop_signals()

import torch

from shardwise.compat.compiler import import_compiler
from shardwise.config.load import config_from_values, make_task

server = os.getpid()

# The first step of any optimizer imports PyTorch's compiler, which takes seconds (torch 2.13). A step here would ask the GPU
# whether it is capturing a graph (torch 2.11), and then no rank forked from here could use it.
import_compiler()

# So does the first save of a tensor, in tenths of a second.
torch.save(torch.zeros(1), io.BytesIO())

# So does much of a library that imports a model's code when the model is built: a task that comes with shardwise is built
# once, on no device. Whatever is wrong with it, its rank will say so.
with contextlib.suppress(Exception):
    if _values := os.environ.pop(REHEARSED, None):
        _task = make_task(config_from_values(json.loads(_values)))
        with torch.device("meta"):
            _task.build_model()
        del _task
