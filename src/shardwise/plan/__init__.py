"""Before the run: what a model needs, and which strategy suits it.

Builds shapes on the meta device; nothing here trains.
"""

from shardwise.parallel.advice import Machines
from shardwise.parallel.memory import ModelSizes, StateBytes
from shardwise.plan.advise import Advice, advise

__all__ = ["Advice", "Machines", "ModelSizes", "StateBytes", "advise"]
