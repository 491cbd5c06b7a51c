"""Which sample goes where: the global order, its spreading over ranks and micro-batches, the cursor, the loader. And
whether training and validation share samples.

Knows nothing of models, strategies or tasks.
"""

from shardwise.data.loader import BatchedSamples, MicroBatch, Reader, Samples, StepBatch, StepLoader
from shardwise.data.order import Cursor, GlobalOrder, shares
from shardwise.data.overlap import Contents, SampleContents

__all__ = [
    "BatchedSamples",
    "Contents",
    "Cursor",
    "GlobalOrder",
    "MicroBatch",
    "Reader",
    "SampleContents",
    "Samples",
    "StepBatch",
    "StepLoader",
    "shares",
]
