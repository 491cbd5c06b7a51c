"""What a seed is used for. Every random stream of a run is keyed by (seed, purpose, …), so no two can coincide."""

from __future__ import annotations

from enum import IntEnum


class Purpose(IntEnum):
    WEIGHTS = 1
    """Of the model: the same on every rank."""
    STEP = 2
    """What the model draws in a step (dropout): keyed by step and rank."""
    ORDER = 3
    """The permutation of an epoch."""
    SAMPLE = 4
    """What a data set draws for a sample (augmentation, masking): keyed by epoch and sample."""
    COLLATE = 5
    """What is drawn when a micro-batch is put together: keyed by epoch and its samples."""
    DATA = 7
    """What a task draws when it makes its data: the same on every rank."""
    SPLIT = 6
    """Which samples are held out for validation."""
    EVALUATE = 8
    """What is drawn in an evaluation, the same in each: keyed by rank."""
