"""Whether the files can be trained on: one error that names all that cannot, and what to do."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterator, Sequence

import numpy as np

from shardwise.errors import DataError
from shardwise.tasks.segmentation.config import SegmentationData
from shardwise.tasks.segmentation.facts import Facts, all_facts, facts_of
from shardwise.tasks.segmentation.nifti import Grid, by, mm
from shardwise.tasks.segmentation.subjects import Split, Subject, several

log = logging.getLogger(__name__)

SECONDS_BETWEEN_NEWS = 10.0
LARGEST = float(np.finfo(np.float32).max)
FLAT = 0.01
"""Of the deviation: what lies this near together looks all alike once it is normalised."""
UNKNOWN = 255
"""In many labels, what nobody could tell, or the foreground of a mask that was saved as a picture."""
MANY_STRANGE = 100
"""A label with so many values beside the classes may be an image."""


def check_subjects(
    subjects: list[Subject], classes: int, channels: int | None, options: SegmentationData
) -> list[Facts]:
    """The facts of every subject, or one error that names what is wrong with which file. Without `channels`, all
    images must have as many as the first."""
    facts: list[Facts] = []
    problems: list[str] = []
    for subject, found in zip(subjects, _told(subjects), strict=True):
        if isinstance(found, DataError):
            problems.append(str(found))
        else:
            facts.append(found)
            problems += _problems(subject, found, classes, channels or facts[0].image.channels, options)
    if problems:
        raise several(problems)
    return facts


def check_foreground(split: Split, facts: Sequence[Facts], classes: Sequence[str]) -> None:
    """A model cannot learn what is nowhere, and Dice is not defined where there is nothing to find."""
    parts = {
        "training": (split.train, facts[: len(split.train)]),
        "validation": (split.valid, facts[len(split.train) :]),
    }
    for name, (subjects, known) in parts.items():
        there = {value for each in known for value in each.values}
        absent = [label for number, label in enumerate(classes) if number and number not in there]
        if len(absent) == len(classes) - 1:
            raise DataError(
                f"none of the {len(subjects)} {name} labels has any foreground, {subjects[0].label} for example: "
                "are these the right files?"
            )
        if absent:
            log.warning(f"no {name} subject has the class(es) {', '.join(absent)}")


def check_again(subject: Subject, classes: int, channels: int, options: SegmentationData) -> None:
    """Just before it is used: it may have changed since the start. Free of cost where it has not."""
    if problems := list(_problems(subject, facts_of(subject), classes, channels, options)):
        raise several(problems)


def _told(subjects: list[Subject]) -> Iterator[Facts | DataError]:
    began = told = time.monotonic()
    for done, found in enumerate(all_facts(subjects), start=1):
        yield found
        now = time.monotonic()
        if now - told >= SECONDS_BETWEEN_NEWS:
            told = now
            left = (now - began) / done * (len(subjects) - done)
            log.info(f"checking the files: {done} of {len(subjects)} subjects, about {left:.0f} s left")


def _problems(subject: Subject, facts: Facts, classes: int, channels: int, options: SegmentationData) -> Iterator[str]:
    image, label = facts.image, facts.label
    yield from _wrong_values(subject, facts, options)
    if (first := _channels_first(image, label)) is not None:
        yield (
            f"{subject.image} has the shape {by((*image.shape, image.channels))}: the channels stand first; move them last "
            f"({by((*first[1:], first[0]))})"
        )
        return
    if image.channels != channels:
        yield f"{subject.image} has {image.channels} channel(s), but {channels} expected: see data.in_channels"
    if label.channels != 1:
        yield f"{subject.label} has {label.channels} channels: a label has one, with the number of the class in each voxel"
    if image.shape != label.shape:
        yield (
            f"{subject.label} has the shape {by(label.shape)}, but its image {subject.image.name} "
            f"{by(image.shape)}: resample one onto the other"
        )
    elif (apart := _voxels_apart(image, label)) > 0.5:
        lost = [file.name for file, grid in ((subject.image, image), (subject.label, label)) if not grid.oriented]
        why = "their headers differ in orientation, spacing, origin or unit): resample one onto the other"
        if lost:
            why = (
                f"the header of {' and '.join(lost)} has no orientation, qform and sform code are 0): convert it again"
            )
        yield f"{subject.label} lies {apart:.1f} voxels beside its image {subject.image.name} ({why}"
    yield from _absurd_size(subject, image, options)
    if strange := [value for value in facts.values if value not in range(classes)]:
        shown = ", ".join(f"{value:.7g}" for value in strange[:6]) + (", …" if len(strange) > 6 else "")
        advice = "relabel, or name every class in data.classes"
        if len(strange) > MANY_STRANGE:
            advice = "is this an image? A label has the number of a class in each voxel"
        elif facts.values == [0, UNKNOWN]:
            advice = "where 255 means 1, as in masks that are saved as pictures, divide by 255"
        elif UNKNOWN in strange:
            advice += ". 255 often means unknown: every voxel counts, so make it background, or a class of its own"
        yield (
            f"{subject.label} has the value(s) {shown}, but there are {classes} classes, so 0 to {classes - 1} are "
            f"expected: {advice}"
        )


def _channels_first(image: Grid, label: Grid) -> tuple[int, ...] | None:
    """The shape of the image's file, if it is that of the label but for an axis that stands before it."""
    stored = (*image.shape, image.channels)
    of_label = (*label.shape[1:], label.channels) if label.shape[0] == 1 < label.channels else label.shape
    return stored if image.channels > 1 and image.shape != label.shape and stored[1:] == of_label else None


def _wrong_values(subject: Subject, facts: Facts, options: SegmentationData) -> Iterator[str]:
    low, high = facts.lowest, facts.highest
    window = options.intensity_window
    if not (np.isfinite(low) and np.isfinite(high)):
        yield f"{subject.image} has voxels that are NaN or infinite: replace them, or remove the subject"
    elif max(-low, high) > LARGEST:
        yield f"{subject.image} has voxels up to {max(-low, high):g}, more than a 32-bit number holds: scale them down"
    elif low == high:
        yield f"{subject.image} has the value {low:g} in every voxel: copy it again, or remove the subject"
    elif window is not None and (high <= window[0] or low >= window[1]):
        yield (
            f"{subject.image} has intensities from {low:g} to {high:g}, all outside of data.intensity_window {window}, "
            "so nothing would be left of it: set another window, or remove the subject"
        )
    elif window is None and options.normalize != "none":
        for number, channel in enumerate(facts.channels, start=1):
            if 0 < channel.bulk < FLAT * channel.deviation:
                far = channel.lowest if -channel.lowest > channel.highest else channel.highest
                where = f" in channel {number}" if len(facts.channels) > 1 else ""
                yield (
                    f"{subject.image} has voxels of {far:g}{where}, so far out that nearly all others, which lie within "
                    f"{channel.bulk:g}, would look alike after data.normalize: zscore: replace such voxels, or set "
                    "data.intensity_window"
                )


def _absurd_size(subject: Subject, grid: Grid, options: SegmentationData) -> Iterator[str]:
    """A header in other units than it says: told before memory is asked for."""
    if options.spacing is None:
        return
    (shape, size), after = grid.upright(), grid.resampled(options.spacing)
    needed = 4 * (grid.channels + 1) * math.prod(after)
    what = ""
    if math.prod(after) == 1 < math.prod(shape):
        what = "which leaves nothing of it"
    elif needed > _memory():
        what = f"which takes {needed / 2**30:,.0f} GiB, more than this machine has"
    if what:
        unit = "" if grid.unit == "mm" else f" (its header is in {grid.unit})"
        yield (
            f"{subject.image} has {by(shape)} voxels of {mm(size)}{unit}, and {by(after)} after data.spacing "
            f"{options.spacing}, {what}: mend size and unit of the voxels in its header, or set another data.spacing"
        )


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _voxels_apart(image: Grid, label: Grid) -> float:
    """How far the label's corners lie from the image's, in voxels of the image."""
    corners = np.array([[x, y, z, 1] for x in (0, 1) for y in (0, 1) for z in (0, 1)], float)
    corners[:, :3] *= np.array(image.shape) - 1
    moved = corners @ (np.linalg.inv(image.affine) @ np.array(label.affine)).T
    return float(np.abs(moved - corners).max())
