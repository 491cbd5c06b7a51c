"""Whether every class can be learned and judged."""

from __future__ import annotations

import logging

import numpy as np

from shardwise.errors import DataError
from shardwise.tasks.images.check import Checked
from shardwise.tasks.images.pictures import ImageData

log = logging.getLogger(__name__)

SHOWN = 5


def check_classes(images: ImageData, classes: list[str]) -> None:
    """Which classes have images to train and to validate on."""
    train, valid = (np.bincount(part.labels, minlength=len(classes)) > 0 for part in (images.train, images.valid))
    if untrained := _named(classes, valid & ~train):
        raise DataError(
            f"there are validation images of {untrained}, but none to train on: a model cannot know what it never saw. Add "
            "training images, or take these out of the validation data"
        )
    if train.sum() < 2:
        raise DataError(
            f"all {len(images.train)} training images are of one class, {_named(classes, train)}: there is nothing to tell "
            "apart. Was the data cut off in the middle, where it is sorted by class?"
        )
    if absent := _named(classes, ~train):
        log.warning(
            f"there is no training image of {absent}: the model has an output for it, and learns never to choose it"
        )
    if unjudged := _named(classes, train & ~valid):
        log.warning(f"there is no validation image of {unjudged}: the accuracy says nothing about it")


def tell_conflicts(images: ImageData, classes: list[str], checked: Checked | None) -> None:
    """The same file in two classes: one of its labels is wrong."""
    if checked is None:
        return
    order = np.lexsort((images.train.labels, checked.contents))
    contents, labels = checked.contents[order], images.train.labels[order]
    conflicts = np.flatnonzero((contents[1:] == contents[:-1]) & (labels[1:] != labels[:-1]))
    if len(conflicts):
        one, other = (int(order[place]) for place in (conflicts[0], conflicts[0] + 1))
        files = len(np.unique(contents[conflicts]))
        log.warning(
            f"{files} training image{'s stand' if files > 1 else ' stands'} in two classes or more. {images.train.name(one)} "
            f"({classes[images.train.labels[one]]}) has the same content as {images.train.name(other)} "
            f"({classes[images.train.labels[other]]}), for example: one of the two labels is wrong"
        )


def _named(classes: list[str], which: np.ndarray) -> str:
    names = [name for name, there in zip(classes, which.tolist(), strict=True) if there]
    if not names:
        return ""
    listed = ", ".join(names[:SHOWN]) + (", …" if len(names) > SHOWN else "")
    return f"the class {listed}" if len(names) == 1 else f"{len(names)} classes ({listed})"
