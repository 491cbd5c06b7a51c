"""Before the run: what a model needs, and which strategy suits it.

Builds shapes on the meta device; nothing here trains.
"""

from shardwise.parallel.memory import ModelSizes, StateBytes
from shardwise.plan.advise import Advice, Machines, advise, state_bytes

__all__ = ["Advice", "Machines", "ModelSizes", "StateBytes", "advise", "state_bytes"]
