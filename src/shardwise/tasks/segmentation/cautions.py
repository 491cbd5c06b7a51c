"""What a careful person would want to know of files that can be trained on: one warning for each, with a file named."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from shardwise.tasks.segmentation.config import SegmentationData
from shardwise.tasks.segmentation.facts import Facts
from shardwise.tasks.segmentation.intensities import TAIL
from shardwise.tasks.segmentation.nifti import by, mm
from shardwise.tasks.segmentation.subjects import AT_MOST, Split, Subject, alike, unread_folders

log = logging.getLogger(__name__)

MOSTLY = 0.9
"""A label with more foreground than this, among others with less than the rest, is likely turned inside out."""
OTHER_UNIT = 100.0
"""The ranges of images in one unit do not differ by so much."""
ALIKE = 0.01
"""Voxels that differ in size by this share or less differ by rounding."""


def warn_of_shared_names(split: Split) -> None:
    """In two folders, the same name may be the same person."""
    known = {subject.name: subject for subject in split.train}
    if both := [subject for subject in split.valid if subject.name in known]:
        log.warning(
            f"{len(both)} validation subject(s) have the name of a training subject, {both[0].image.parent} and "
            f"{known[both[0].name].image.parent} for example; if they are the same people, the validation is too good: "
            "remove them from one of the two"
        )


def warn_of_unread_folders(root: Path, share: float) -> None:
    """Where a share of train/ is held out: did somebody mean to validate on those in test/?"""
    if others := unread_folders(root):
        log.warning(
            f"{root}: {_list([f'{name}/' for name in others])} beside train/ is not read; {share:.0%} of the subjects in "
            "train/ are held out for validation. A folder valid/ would be validated on instead"
        )


def warn_of_mixed_pairs(subjects: Sequence[Subject]) -> None:
    """In a list, a label that has the name of another image."""
    images = {_plain_name(subject.image): subject for subject in subjects}
    mixed = [each for each in subjects if images.get(_plain_name(each.label), each) is not each]
    if mixed and len(images) == len(subjects):
        first = mixed[0]
        log.warning(
            f"{len(mixed)} of {len(subjects)} images are listed with a label that has the name of another image: {first.image} "
            f"with {first.label}, for example. Are the lists shifted against each other?"
        )


def _plain_name(path: Path) -> str:
    """la_003 of la_003_0000.nii.gz."""
    return path.name.partition(".nii")[0].removesuffix("_0000")


def warn_of_misplaced_background(classes: Sequence[str]) -> None:
    names = [alike(name) for name in classes]
    for name in ("background", "bg"):
        if name in names[1:]:
            number = names.index(name, 1)
            log.warning(
                f"class {number} is named {classes[number]!r}, but the background is class 0, here {classes[0]!r}, which "
                "counts for no Dice: put the names in the order of the labels' numbers"
            )


def warn_of_mixed_spacing(subjects: Sequence[Subject], facts: Sequence[Facts]) -> None:
    """Of volumes that are cut into patches as they are: to the network, a voxel is a voxel."""
    sizes = [each.image.upright()[1] for each in facts]
    kinds: list[tuple[tuple[float, float, float], list[Subject]]] = []
    for size, subject in zip(sizes, subjects, strict=True):
        like = [members for known, members in kinds if np.allclose(known, size, rtol=ALIKE, atol=0)]
        if like:
            like[0].append(subject)
        else:
            kinds.append((size, [subject]))
    if len(kinds) == 1:
        return
    kinds.sort(key=lambda kind: -len(kind[1]))
    lines = [
        f"{mm(size)} in {len(members)} of {len(subjects)} volumes, {members[0].image} for example"
        for size, members in kinds[:AT_MOST]
    ]
    more = [f"and {len(kinds) - AT_MOST} other sizes"] if len(kinds) > AT_MOST else []
    middle = ", ".join(f"{value:.3g}" for value in np.median(np.array(sizes), axis=0))
    log.warning(
        "voxels differ in size, but patches are cut as if they did not, so the same organ comes in different sizes; "
        f"data.spacing resamples all volumes to one, [{middle}] would be the middle:\n  " + "\n  ".join(lines + more)
    )


def warn_of_single_slices(subjects: Sequence[Subject], facts: Sequence[Facts], options: SegmentationData) -> None:
    """A picture among volumes: copies of it, or zeros, fill what the network sees."""
    shapes = [each.image.resampled(options.spacing) for each in facts]
    flat = [
        (subject.image, shape)
        for subject, shape in zip(subjects, shapes, strict=True)
        if any(side == 1 < wanted for side, wanted in zip(shape, options.size, strict=True))
    ]
    if flat:
        filled = "copies of it" if options.spatial_mode == "resize" else "zeros"
        after = f" after data.spacing {options.spacing}" if options.spacing is not None else ""
        log.warning(
            f"{len(flat)} of {len(subjects)} volumes are a single slice{after}, and {filled} fill data.size "
            f"{options.size}: {flat[0][0]} is {by(flat[0][1])}"
        )


def warn_of_empty_channels(subjects: Sequence[Subject], facts: Sequence[Facts]) -> None:
    """The same value in all voxels but a few. Where a whole image has one value, that is an error."""
    empty = [
        (subject.image, number, channel)
        for subject, each in zip(subjects, facts, strict=True)
        for number, channel in enumerate(each.channels, start=1)
        # A share s of the voxels, that far from all others, makes a deviation of its root.
        if not channel.bulk > 0 and channel.deviation <= (channel.highest - channel.lowest) * TAIL**0.5
    ]
    if empty:
        image, number, channel = empty[0]
        constant = channel.lowest == channel.highest
        what = f"the value {channel.lowest:g} in all voxels" if constant else "one value in all voxels but a few"
        log.warning(
            f"{len({image for image, *_ in empty})} of {len(subjects)} images have nothing, or next to nothing, in a channel: "
            f"{image} has {what} of channel {number}, for example"
        )


def warn_of_shared_labels(subjects: Sequence[Subject], facts: Sequence[Facts]) -> None:
    """One mask that was saved for several subjects."""
    by_label: dict[str, dict[str, Subject]] = {}
    for subject, each in zip(subjects, facts, strict=True):
        if each.foreground:
            by_label.setdefault(each.label_content, {})[each.content] = subject
    shared = [list(images.values()) for images in by_label.values() if len(images) > 1]
    if shared:
        first, second = shared[0][:2]
        log.warning(
            f"{sum(map(len, shared))} of {len(subjects)} labels are the same as that of another image, voxel by voxel: "
            f"{first.label} and {second.label}, for example. Is one of them a copy that was saved in the wrong place?"
        )


def warn_of_images_that_are_labels(subjects: Sequence[Subject], facts: Sequence[Facts]) -> None:
    copies = [subject for subject, each in zip(subjects, facts, strict=True) if each.content == each.label_content]
    if copies:
        log.warning(
            f"{len(copies)} of {len(subjects)} images hold the same voxels as their label: {copies[0].image} and "
            f"{copies[0].label.name}, for example. One is a copy of the other"
        )


def warn_of_inverted_labels(subjects: Sequence[Subject], facts: Sequence[Facts]) -> None:
    """Foreground and background changed over."""
    usual = float(np.median([each.foreground for each in facts]))
    inverted = [
        (subject.label, each.foreground)
        for subject, each in zip(subjects, facts, strict=True)
        if each.foreground > MOSTLY and usual < 1 - MOSTLY
    ]
    if inverted:
        label, share = inverted[0]
        log.warning(
            f"{len(inverted)} of {len(subjects)} labels are nearly all foreground, where the others have {usual:.2%} of it: "
            f"{label} has {share:.0%}, for example. Are foreground and background changed over?"
        )


def warn_of_other_units(subjects: Sequence[Subject], facts: Sequence[Facts], options: SegmentationData) -> None:
    """What `zscore` would make alike, the same window or none does not."""
    if options.intensity_window is None and options.normalize != "none":
        return
    ranges = [max(channel.bulk for channel in each.channels) for each in facts]
    usual = float(np.nanmedian(ranges)) if not np.isnan(ranges).all() else 0.0
    other = [
        (subject.image, size)
        for subject, size in zip(subjects, ranges, strict=True)
        if usual and size and not 1 / OTHER_UNIT < size / usual < OTHER_UNIT and not np.isnan(size)
    ]
    if other:
        image, size = other[0]
        log.warning(
            f"the intensities of {len(other)} of {len(subjects)} images seem to be in another unit: nearly all voxels of {image} "
            f"lie within {size:.3g}, for example, and those of most others within {usual:.3g}"
        )


def warn_of_guessed_channels(subjects: Sequence[Subject], facts: Sequence[Facts]) -> None:
    """A fourth dimension may be channels, or time."""
    if (number := facts[0].image.channels) > 1:
        log.warning(
            f"the fourth dimension of the images is taken as {number} channels, {subjects[0].image} for example; "
            f"if it is that and not time, data.in_channels: {number} says so"
        )


def warn_of_unknown_sides(subjects: Sequence[Subject], facts: Sequence[Facts], sided: Sequence[str]) -> None:
    """Which side is left stands in the header alone."""
    lost = [subject for subject, each in zip(subjects, facts, strict=True) if not each.image.oriented]
    if sided and lost:
        log.warning(
            f"the header of {len(lost)} of {len(subjects)} images does not say which side is left (qform and sform code "
            f"are 0), but the class(es) {_list(sided)} depend on it: {lost[0].image} for example"
        )


def warn_of_two_sides(subjects: Sequence[Subject], facts: Sequence[Facts], sided: Sequence[str]) -> None:
    """As some tools leave it that change one of the two forms."""
    torn = [subject for subject, each in zip(subjects, facts, strict=True) if each.image.two_sides]
    if sided and torn:
        log.warning(
            f"the header of {len(torn)} of {len(subjects)} images has two opinions on which side is left (qform and sform "
            f"contradict each other; sform holds), and the class(es) {_list(sided)} depend on it: {torn[0].image} for example"
        )


def warn_of_flipped_sides(sided: Sequence[str], flips: float, *, chosen: bool) -> None:
    """`flips` is the probability along left-right, `chosen` where the config says so itself."""
    if not sided:
        return
    if flips:
        log.warning(
            f"data.flips turns left into right, but the class(es) {_list(sided)} tell one from the other: "
            "set data.flips: [0, 0.5, 0.5], left-right first, or leave it out"
        )
    elif not chosen:
        log.info(f"no flips from left to right: the class(es) {_list(sided)} tell one from the other")


def _list(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (", …" if len(names) > 4 else "")
