"""What is trained: the Task protocol, the tasks that come with shardwise, one folder each, and a user's own by import path.

A task knows its data, its model and its loss. It knows nothing of ranks. Its folder has config.py, which is read without torch,
task.py, and whatever else it is made of.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.tasks.base import Loss, Rows, Task

__all__ = ["Loss", "Rows", "Task"]


def __getattr__(name: str) -> Any:
    # On first use: the config of a task lies below this package, and is read without torch.
    if name in __all__:
        return getattr(importlib.import_module("shardwise.tasks.base"), name)
    raise AttributeError(f"module 'shardwise.tasks' has no attribute {name!r}")
