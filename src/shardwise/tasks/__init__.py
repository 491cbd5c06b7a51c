"""What is trained: the Task protocol, the tasks that come with shardwise, and a user's own by import path.

A task knows its data, its model and its loss. It knows nothing of ranks.
"""

from shardwise.tasks.base import Loss, Rows, Task

__all__ = ["Loss", "Rows", "Task"]
