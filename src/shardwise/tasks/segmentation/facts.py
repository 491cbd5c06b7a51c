"""What is known of a subject's files. They are read once, to their end; what was found is remembered until they change.

What is remembered are facts (shape, values), not verdicts: the same facts are judged anew under other settings.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from os import cpu_count
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.data.cache import cache_folder, cache_name, code_stamp, file_stamp, made_once
from shardwise.errors import DataError
from shardwise.tasks.segmentation import intensities, nifti
from shardwise.tasks.segmentation.intensities import Intensities, digest_of, intensities_of
from shardwise.tasks.segmentation.nifti import Grid, read_volume
from shardwise.tasks.segmentation.subjects import Subject

MANY_VALUES = 1000
"""A label file with more values than this is no label file; that many are kept to show."""
WHOLE = 1e-3
"""A label this near to a whole number is meant to be it: scaled integers come back as 0.99998."""


@dataclass(frozen=True)
class Facts:
    image: Grid
    label: Grid
    channels: list[Intensities]
    """Of the image."""
    content: str
    """The same for images with the same voxels, however they are stored."""
    values: list[float]
    """Those that occur in the label, the first MANY_VALUES of them; what is WHOLE but for rounding is whole here."""
    label_content: str
    """As `content`, of the label."""
    foreground: float
    """The share of the label's voxels that are no background."""

    @property
    def lowest(self) -> float:
        """NaN if one of the voxels is."""
        return float(np.min([channel.lowest for channel in self.channels]))

    @property
    def highest(self) -> float:
        return float(np.max([channel.highest for channel in self.channels]))


def facts_of(subject: Subject) -> Facts:
    """DataError where a file is missing, damaged or no volume."""
    for file in (subject.image, subject.label):
        if not file.is_file():
            raise DataError(f"there is no file {file}: put it there, or take the subject out of the data set")
    name = cache_name(
        code_stamp(__file__, nifti.__file__, intensities.__file__), file_stamp(subject.image, subject.label)
    )
    file = cache_folder() / "segmentation" / "checked" / f"{name}.json"
    try:
        return _read(made_once(file, partial(_write, subject)))
    except (ValueError, KeyError, TypeError):  # a disk that was full, a machine that lost power: it must be right then
        file.unlink(missing_ok=True)
        return _read(made_once(file, partial(_write, subject)))


def all_facts(subjects: list[Subject]) -> Iterator[Facts | DataError]:
    """Of each subject in turn, or why there are none."""
    # Threads: unpacking is most of the work, and zlib does it outside Python's lock.
    with ThreadPoolExecutor(max_workers=min(4, cpu_count() or 1)) as pool:
        yield from pool.map(_facts_or_error, subjects)


def inspect_files(subject: Subject) -> Facts:
    """Reads both files to the end."""
    image, voxels = read_volume(subject.image)
    channels, content = intensities_of(voxels), digest_of(voxels)
    del voxels  # before the next one comes: they are large
    label, classes = read_volume(subject.label)
    foreground = float(np.count_nonzero(classes > 0.5)) / max(1, classes.size)
    return Facts(image, label, channels, content, _values(classes), digest_of(classes), foreground)


def _facts_or_error(subject: Subject) -> Facts | DataError:
    try:
        return facts_of(subject)
    except DataError as error:
        return error


def _write(subject: Subject, file: Path) -> None:
    file.write_text(json.dumps(asdict(inspect_files(subject))))


def _read(file: Path) -> Facts:
    content = json.loads(file.read_text())
    image, label = (Grid(**{**content[name], "shape": tuple(content[name]["shape"])}) for name in ("image", "label"))
    channels = [Intensities(**channel) for channel in content["channels"]]
    rest = (content[name] for name in ("content", "values", "label_content", "foreground"))
    return Facts(image, label, channels, *rest)


def _values(label: NDArray[Any]) -> list[float]:
    if label.dtype.kind in "iu" and label.min() >= 0 and label.max() < 65536:
        # Counting is much faster than the sorting that np.unique does. It takes no uint64.
        flat = label.ravel(order="K")
        found = np.flatnonzero(np.bincount(flat.astype(np.int64) if flat.dtype == np.uint64 else flat))
    else:
        found = np.unique(label)
        whole = np.rint(found)
        found = np.unique(np.where(np.abs(found - whole) <= WHOLE, whole, found))
    return [float(value) for value in found[:MANY_VALUES]]
