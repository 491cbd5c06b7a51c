"""Before the run: what a model needs, and which strategy suits it.

Builds shapes on the meta device; nothing here trains.
"""

from shardwise.parallel.memory import ModelSizes, StateBytes, state_bytes
from shardwise.plan.advise import Advice, Machines, advise

__all__ = ["Advice", "Machines", "ModelSizes", "StateBytes", "advise", "state_bytes"]
