"""Which sample goes where: the global order, its spreading over ranks and micro-batches, the cursor, the loader.

Knows nothing of models, strategies or tasks.
"""

from shardwise.data.loader import (
    BatchedSamples,
    MicroBatch,
    Reader,
    Repeated,
    Samples,
    StepBatch,
    StepLoader,
    read_beside,
)
from shardwise.data.order import Cursor, GlobalOrder, shares

__all__ = [
    "BatchedSamples",
    "Cursor",
    "GlobalOrder",
    "MicroBatch",
    "Reader",
    "Repeated",
    "Samples",
    "StepBatch",
    "StepLoader",
    "read_beside",
    "shares",
]
