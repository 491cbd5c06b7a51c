"""How the model is spread: the world of ranks, and the strategies that put a model onto it.

Knows nothing of tasks, data or the loop.
"""

from shardwise.parallel.compatibility import refuse_incompatible
from shardwise.parallel.layout import Layout
from shardwise.parallel.parallelize import ParallelModel, parallelize
from shardwise.parallel.world import World

__all__ = ["Layout", "ParallelModel", "World", "parallelize", "refuse_incompatible"]
