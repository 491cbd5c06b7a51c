"""shardwise: train PyTorch models on one device, many devices or many machines from one YAML file."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Loaded on first use: `shardwise --help` must not wait for torch.
_HOMES = {
    "Session": "shardwise.engine.session",
    "StepResult": "shardwise.engine.step_result",
    "Observer": "shardwise.engine.observers",
    "Strategy": "shardwise.parallel",
    "Task": "shardwise.tasks",
    "Loss": "shardwise.tasks",
    "Rows": "shardwise.tasks",
    "BatchedSamples": "shardwise.data",
    "Contents": "shardwise.data",
    "SampleContents": "shardwise.data",
    "Block": "shardwise.config",
    "DataBlock": "shardwise.config",
    "PathText": "shardwise.config",
    "Config": "shardwise.config",
    "load_config": "shardwise.config",
    "hub_name": "shardwise.config.schema",
    "ShardwiseError": "shardwise.errors",
    "Gathered": "shardwise.parallel.gather",
    "gather_batch": "shardwise.parallel.gather",
}
__all__ = [
    "BatchedSamples",
    "Block",
    "Config",
    "Contents",
    "DataBlock",
    "Gathered",
    "Loss",
    "Observer",
    "PathText",
    "Rows",
    "SampleContents",
    "Session",
    "ShardwiseError",
    "StepResult",
    "Strategy",
    "Task",
    "gather_batch",
    "hub_name",
    "load_config",
]

if TYPE_CHECKING:
    from shardwise.config import Block, Config, DataBlock, PathText, load_config
    from shardwise.config.schema import hub_name
    from shardwise.data import BatchedSamples, Contents, SampleContents
    from shardwise.engine.observers import Observer
    from shardwise.engine.session import Session
    from shardwise.engine.step_result import StepResult
    from shardwise.errors import ShardwiseError
    from shardwise.parallel import Strategy
    from shardwise.parallel.gather import Gathered, gather_batch
    from shardwise.tasks import Loss, Rows, Task


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
