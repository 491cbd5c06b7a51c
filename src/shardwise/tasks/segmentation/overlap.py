"""What tells subjects apart: the voxels of their images, which were read when the files were checked."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardwise.data.overlap import ANY, NEVER, Contents, SampleContents
from shardwise.tasks.segmentation.facts import facts_of
from shardwise.tasks.segmentation.subjects import Split, Subject


def subject_contents(split: Split) -> SampleContents:
    return SampleContents(
        Contents(_numbers(split.train), lambda place: str(split.train[place].image)),
        Contents(_numbers(split.valid), lambda place: str(split.valid[place].image)),
        unit="subjects",
        error_above=NEVER if split.held_out else ANY,
        held_out=split.held_out,
    )


def _numbers(subjects: list[Subject]) -> NDArray[np.uint64]:
    return np.array([int(facts_of(subject).content[:16], 16) for subject in subjects], np.uint64)
