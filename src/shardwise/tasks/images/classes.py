"""Whether every class can be learned and judged."""

from __future__ import annotations

import logging

import numpy as np

from shardwise.errors import DataError
from shardwise.tasks.images.check import Checked
from shardwise.tasks.images.names import SHOWN, tell_alike
from shardwise.tasks.images.pictures import ImageData

log = logging.getLogger(__name__)


def check_classes(images: ImageData, classes: list[str]) -> None:
    """Which classes have images to train and to validate on, and whether each is one."""
    tell_alike(classes)
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


def tell_conflicts(images: ImageData, classes: list[str], checked: list[Checked | None]) -> None:
    """The same file in two classes, to train or to validate on: one of its labels is wrong."""
    known = [(part, each.contents) for part, each in zip((images.train, images.valid), checked, strict=True) if each]
    if not known:
        return
    all_labels = np.concatenate([part.labels for part, _ in known])
    all_contents = np.concatenate([contents for _, contents in known])
    names = [(part, index) for part, _ in known for index in range(len(part))]
    order = np.lexsort((all_labels, all_contents))
    contents, labels = all_contents[order], all_labels[order]
    conflicts = np.flatnonzero((contents[1:] == contents[:-1]) & (labels[1:] != labels[:-1]))
    if len(conflicts):
        one, other = (
            f"{names[number][0].name(names[number][1])} ({classes[all_labels[number]]})"
            for number in order[conflicts[0] : conflicts[0] + 2]
        )
        files = len(np.unique(contents[conflicts]))
        log.warning(
            f"{files} image{'s stand' if files > 1 else ' stands'} in two classes or more. {one} has the same content as "
            f"{other}, for example: one of the two labels is wrong"
        )


def _named(classes: list[str], which: np.ndarray) -> str:
    names = [name for name, there in zip(classes, which.tolist(), strict=True) if there]
    if not names:
        return ""
    listed = ", ".join(names[:SHOWN]) + (", …" if len(names) > SHOWN else "")
    return f"the class {listed}" if len(names) == 1 else f"{len(names)} classes ({listed})"
