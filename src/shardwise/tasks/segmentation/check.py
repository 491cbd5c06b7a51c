"""Whether the files can be trained on: every file is read once, and what was found is remembered.

What is remembered are facts (shape, values), not verdicts: the same facts are judged anew under other settings.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.data.cache import cache_folder, made_once
from shardwise.errors import DataError
from shardwise.tasks.segmentation.subjects import Subject, several

log = logging.getLogger(__name__)

VERSION = 2
"""Raised when other facts are needed."""
MANY_VALUES = 1000
"""A label file with more values than this is no label file; that many are kept to show."""
SECONDS_BETWEEN_NEWS = 10.0


@dataclass(frozen=True)
class Grid:
    """Where the voxels of a file lie."""

    shape: tuple[int, int, int]
    channels: int
    affine: list[list[float]]


@dataclass(frozen=True)
class Facts:
    image: Grid
    label: Grid
    finite: bool
    values: list[float]
    """Those that occur in the label, the first MANY_VALUES of them."""


def check_subjects(subjects: list[Subject], classes: int, channels: int | None) -> list[Facts]:
    """The facts of every subject, or one error that names what is wrong with which file. Without `channels`, all
    images must have as many as the first."""
    facts: list[Facts] = []
    problems: list[str] = []
    for subject, found in zip(subjects, _inspected(subjects), strict=True):
        if isinstance(found, DataError):
            problems.append(str(found))
        else:
            facts.append(found)
            problems += _problems(subject, found, classes, channels or facts[0].image.channels)
    if problems:
        raise several(problems)
    return facts


def read_grid(file: Path) -> Grid:
    """From the header alone."""
    return _grid(file, _open(file))


def stamp(*files: Path) -> list[Any]:
    """What changes when a file does."""
    stats = [(file.resolve(), file.stat()) for file in files]
    return [[str(file), stat.st_size, stat.st_mtime_ns] for file, stat in stats]


def _inspected(subjects: list[Subject]) -> Iterator[Facts | DataError]:
    began = told = time.monotonic()
    # Threads: unpacking is most of the work, and zlib does it outside Python's lock.
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        for done, found in enumerate(pool.map(_remembered, subjects), start=1):
            yield found
            now = time.monotonic()
            if now - told >= SECONDS_BETWEEN_NEWS:
                told = now
                left = (now - began) / done * (len(subjects) - done)
                log.info(f"checking the files: {done} of {len(subjects)} subjects, about {left:.0f} s left")


def _remembered(subject: Subject) -> Facts | DataError:
    try:
        for file in (subject.image, subject.label):
            if not file.is_file():
                raise DataError(f"there is no file {file}: put it there, or take the subject out of the data set")
        key = json.dumps([VERSION, stamp(subject.image, subject.label)])
        file = cache_folder() / "segmentation" / "checked" / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
        made_once(file, lambda aside: _write(aside, inspect_files(subject)))
        try:
            return _read(file)
        except (ValueError, KeyError, TypeError):  # a disk that was full, a machine that lost power
            file.unlink(missing_ok=True)
            return inspect_files(subject)
    except DataError as error:
        return error


def _write(file: Path, facts: Facts) -> None:
    file.write_text(json.dumps(asdict(facts)))


def _read(file: Path) -> Facts:
    content = json.loads(file.read_text())
    image, label = (Grid(tuple(grid["shape"]), grid["channels"], grid["affine"]) for grid in
                    (content["image"], content["label"]))  # fmt: skip
    return Facts(image, label, content["finite"], content["values"])


def inspect_files(subject: Subject) -> Facts:
    """Reads both files to the end."""
    (image, image_voxels), (label, label_voxels) = (_voxels(file) for file in (subject.image, subject.label))
    finite = image_voxels.dtype.kind in "iub" or bool(np.isfinite(image_voxels).all())
    return Facts(image, label, finite, _values(label_voxels))


def _open(file: Path) -> Any:
    import nibabel

    try:
        return nibabel.load(file)
    except Exception as error:  # nibabel passes on what its many readers raise
        raise _unreadable(file, error) from None


def _voxels(file: Path) -> tuple[Grid, NDArray[Any]]:
    opened = _open(file)
    grid = _grid(file, opened)
    try:
        return grid, np.asanyarray(opened.dataobj)
    except Exception as error:  # gzip, zlib and numpy each have their own for a file that ends too early
        raise _unreadable(file, error) from None


def _unreadable(file: Path, error: Exception) -> DataError:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return DataError(f"{file} is damaged or no NIfTI file ({reason}): copy it again, or remove the subject")


def _grid(file: Path, opened: Any) -> Grid:
    shape = tuple(int(side) for side in opened.shape)
    if len(shape) == 4 or (len(shape) == 3 and all(shape)):
        channels = shape[3] if len(shape) == 4 else 1
        return Grid((shape[0], shape[1], shape[2]), channels, np.asarray(opened.affine, float).tolist())
    raise DataError(f"{file} has the shape {_by(shape)}: a volume has three sides, and may have channels after them")


def _values(label: NDArray[Any]) -> list[float]:
    if label.dtype.kind in "iu" and label.size and label.min() >= 0 and label.max() < 65536:
        # Counting is much faster than the sorting that np.unique does.
        found = np.flatnonzero(np.bincount(label.ravel()))
    else:
        found = np.unique(label)
    return [float(value) for value in found[:MANY_VALUES]]


def _problems(subject: Subject, facts: Facts, classes: int, channels: int) -> Iterator[str]:
    image, label = facts.image, facts.label
    if not facts.finite:
        yield f"{subject.image} has voxels that are NaN or infinite: replace them, or remove the subject"
    if image.channels != channels:
        yield f"{subject.image} has {image.channels} channel(s), but {channels} expected: see data.in_channels"
    if label.channels != 1:
        yield f"{subject.label} has {label.channels} channels: a label has one, with the number of the class in each voxel"
    if image.shape != label.shape:
        yield (
            f"{subject.label} has the shape {_by(label.shape)}, but its image {subject.image.name} "
            f"{_by(image.shape)}: resample one onto the other"
        )
    elif (apart := _voxels_apart(image, label)) > 0.5:
        yield (
            f"{subject.label} lies {apart:.1f} voxels beside its image {subject.image.name} (their headers differ in "
            "orientation, spacing or origin): resample one onto the other"
        )
    if strange := [value for value in facts.values if value not in range(classes)]:
        shown = ", ".join(f"{value:g}" for value in strange[:6]) + (", …" if len(strange) > 6 else "")
        yield (
            f"{subject.label} has the value(s) {shown}, but data.classes is {classes}, so 0 to {classes - 1} are "
            "expected: relabel, or name every class"
        )


def _voxels_apart(image: Grid, label: Grid) -> float:
    """How far the label's corners lie from the image's, in voxels of the image."""
    corners = np.array([[x, y, z, 1] for x in (0, 1) for y in (0, 1) for z in (0, 1)], float)
    corners[:, :3] *= np.array(image.shape) - 1
    try:
        moved = corners @ (np.linalg.inv(image.affine) @ np.array(label.affine)).T
    except np.linalg.LinAlgError:  # a header without a usable affine: MONAI takes the voxels as they come
        return 0.0 if image.affine == label.affine else float("inf")
    return float(np.abs(moved - corners).max())


def _by(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))
