"""Which sample goes where: the global order, its spreading over ranks and micro-batches, the cursor, the loader. And
whether training and validation share samples.

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
from shardwise.data.overlap import Contents, SampleContents

__all__ = [
    "BatchedSamples",
    "Contents",
    "Cursor",
    "GlobalOrder",
    "MicroBatch",
    "Reader",
    "Repeated",
    "SampleContents",
    "Samples",
    "StepBatch",
    "StepLoader",
    "read_beside",
    "shares",
]
