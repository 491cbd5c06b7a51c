"""Whether training and validation share samples: then validation measures what was learned by heart.

A task says what tells its samples apart (`Task.sample_contents`); here it is compared. It is a matter of numbers alone, so
that a hundred thousand samples take a fraction of a second.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shardwise.data.file_contents import file_contents
from shardwise.errors import DataError

log = logging.getLogger(__name__)

ANY, MOST, NEVER = 0.0, 0.5, math.inf
"""Values of `error_above`: any shared sample is a mistake; single ones may be chance, but not most of them; all may be."""

_KEY = "data.allow_shared_samples: true"


@dataclass(frozen=True)
class Contents:
    """What tells some samples apart."""

    numbers: NDArray[np.uint64]
    """One for each sample that is looked at. Equal numbers, equal content."""
    name: Callable[[int], str]
    """What a person would look for, by the place in `numbers`."""


@dataclass(frozen=True)
class SampleContents:
    """What tells the samples of training and validation apart."""

    train: Contents
    valid: Contents | None
    unit: str = "samples"
    """What a sample is, for a person: images, games."""
    error_above: float = MOST
    """The share of the validation samples that may be trained on as well: ANY, MOST or NEVER."""
    held_out: bool = False
    """Whether validation is a share of one pool, which shardwise has chosen."""
    can_name: bool = True
    """Whether the config has a key for other samples to validate on."""
    files: Sequence[Path] = ()
    """Files that hold many samples each: none may be there twice."""
    file_numbers: NDArray[np.uint64] | None = None
    """One for each of `files`, where more is known of them than their bytes. Equal numbers, equal content."""
    looked_at: str = ""
    """Where that is not everything: which samples were compared, as the end of a sentence."""


def check_overlap(contents: SampleContents, *, allowed: bool) -> None:
    """An error, or one warning, about samples in both parts; one line about copies among those to train on."""
    _check_files(contents.files, contents.file_numbers, allowed=allowed)
    copies = _copies(contents)
    shared = contents.valid is not None and _check_samples(contents, contents.valid, copies, allowed=allowed)
    if copies and not (shared and contents.held_out):
        log.info(copies)


def _check_files(files: Sequence[Path], numbers: NDArray[np.uint64] | None, *, allowed: bool) -> None:
    if len(files) < 2:
        return
    numbers = file_contents(files) if numbers is None else numbers
    places, first, group = np.unique(numbers, return_index=True, return_inverse=True)
    if len(places) == len(files):
        return
    other = next(place for place in range(len(files)) if first[group[place]] != place)
    one, again = files[first[group[other]]], files[other]
    if one == again:
        what = f"{one} is named twice"
    elif one.samefile(again):
        what = f"{one} and {again} are one file under two names"
    else:
        what = f"{one} and {again} have the same content"
    _raise_or_warn(
        f"data: {what}, so its samples would be trained on twice, or trained on and validated on. Leave one of the two out",
        allowed=allowed,
    )


def _check_samples(contents: SampleContents, valid: Contents, copies: str | None, *, allowed: bool) -> bool:
    """Whether there are any in both; where the seed has parted them, copies in what is trained on are told along with it."""
    train, unit = contents.train, contents.unit
    shared = np.flatnonzero(np.isin(valid.numbers, train.numbers))
    if not len(shared):
        return False
    place = int(shared[0])
    twin = int(np.flatnonzero(train.numbers == valid.numbers[place])[0])
    share = len(shared) / len(valid.numbers)
    said = (
        f"{len(shared)} of {len(valid.numbers)} validation {unit} ({_percent(share)}) {'are' if len(shared) > 1 else 'is'} in "
        f"the training data, too: {valid.name(place)} is the same as {train.name(twin)}"
        f"{', for example' if len(shared) > 1 else ''}{contents.looked_at}. What is trained on cannot be used to validate"
    )
    if contents.held_out:
        said += ". The seed held them out of data with copies in it: remove the copies"
        said += f", or name other {unit} to validate on" if contents.can_name else ""
        said += f". {copies}" if copies else ""
    else:
        said += ": take them out of one of the two"
    if share > contents.error_above:
        _raise_or_warn(said, allowed=allowed)
    else:
        log.warning(said)
    return True


def _copies(contents: SampleContents) -> str | None:
    train, unit = contents.train, contents.unit
    order = np.argsort(train.numbers, kind="stable")
    again = np.flatnonzero(np.diff(train.numbers[order]) == 0)
    if not len(again):
        return None
    one, other = int(order[again[0]]), int(order[again[0] + 1])
    return (
        f"{len(again)} of {len(train.numbers)} training {unit} ({_percent(len(again) / len(train.numbers))}) "
        f"{'are copies' if len(again) > 1 else 'is a copy'} of others, and trained on as often as they are there: "
        f"{train.name(other)} is the same as {train.name(one)}{', for example' if len(again) > 1 else ''}{contents.looked_at}"
    )


def _raise_or_warn(said: str, *, allowed: bool) -> None:
    if not allowed:
        raise DataError(f"{said}; or, if it is meant so, set {_KEY}")
    log.warning(f"{said}. It is allowed by {_KEY}")


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.1 else f"{share:.1%}" if share >= 0.001 else "less than 0.1%"
