"""How the model is spread: the world of ranks, and the strategies that put a model onto it.

Knows nothing of tasks, data or the loop.
"""

from shardwise.parallel.combine import refuse_combinations
from shardwise.parallel.layout import Layout
from shardwise.parallel.spread import Spread, spread
from shardwise.parallel.world import World

__all__ = ["Layout", "Spread", "World", "refuse_combinations", "spread"]
