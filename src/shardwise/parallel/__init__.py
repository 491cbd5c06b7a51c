"""How the model is laid over devices: the world of ranks, what a strategy is (strategy.py), and one file for each.

Knows nothing of tasks, data or the loop.
"""

from shardwise.parallel.layout import Layout
from shardwise.parallel.recipe import ModelSpec
from shardwise.parallel.strategy import Devices, Strategy, refuse, strategy_class, strategy_for
from shardwise.parallel.world import World

__all__ = ["Devices", "Layout", "ModelSpec", "Strategy", "World", "refuse", "strategy_class", "strategy_for"]
