"""Every image is decoded once before training. What was found is kept, so that the next start only looks at what is new."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.data.cache import cache_folder
from shardwise.errors import DataError
from shardwise.tasks.images.decode import HUGE, TINY, Facts, Trait
from shardwise.tasks.images.pictures import Pictures

log = logging.getLogger(__name__)

PROGRESS_SECONDS = 10.0
AT_ONCE = 256
SHOWN = 5

_RECORD = np.dtype([("key", np.uint64), ("picture", np.uint64), ("traits", np.uint8)])
"""What is kept of an image that can be used."""


@dataclass(frozen=True)
class Checked:
    """What is known of some images that can all be used, in their order."""

    contents: NDArray[np.uint64]
    """Equal numbers, equal pictures."""
    traits: NDArray[np.uint8]


def check_images(*parts: Pictures) -> list[Checked | None]:
    """What is known of the images of each part; None where there is nothing to check. Raises one error that names the images
    of all parts which cannot be read."""
    found = [_looked_at(pictures) for pictures in parts]
    problems = [problem for _, problems in found for problem in problems]
    if problems:
        more = f"\n  and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        listed = "".join(f"\n  {problem}" for problem in problems[:SHOWN])
        raise DataError(
            f"{len(problems)} of {sum(map(len, parts))} images cannot be used. Replace or remove them:{listed}{more}"
        )
    return [checked for checked, _ in found]


def tell_traits(parts: list[Pictures], found: list[Checked | None], background: str, *, chosen: bool) -> None:
    """One line for each kind of image that is not what it seems. `background`: what transparent parts show, and whether the
    user has chosen it."""
    images = sum(map(len, parts))
    for trait, (what, then) in {
        Trait.SEVERAL_FRAMES: ("several pages or frames", "the first one is used, the others are not"),
        Trait.TRANSPARENT: ("transparent parts", f"these show data.background, {background}"),
        Trait.TINY: (
            f"fewer than {TINY} pixels in width or height",
            "are they placeholders, or downloads that failed?",
        ),
        Trait.ONE_COLOUR: (
            "one colour in all pixels",
            "are they exports or downloads that failed?",
        ),
        Trait.HUGE: (
            f"more than {HUGE // 10**6} million pixels",
            "each takes seconds, in every epoch; scale them down once",
        ),
    }.items():
        having = [
            (pictures, int(index))
            for pictures, checked in zip(parts, found, strict=True)
            if checked is not None
            for index in np.flatnonzero(checked.traits & np.uint8(trait))
        ]
        if having:
            pictures, index = having[0]
            say = log.info if trait == Trait.TRANSPARENT and chosen else log.warning
            have = "has" if len(having) == 1 else "have"
            say(f"{len(having)} of {images} images {have} {what} ({pictures.name(index)}, for example): {then}")


def _looked_at(pictures: Pictures) -> tuple[Checked | None, list[str]]:
    keys: list[int] = []
    problems: list[str] = []
    for index in range(len(pictures)):
        try:
            key = pictures.key(index)
        except DataError as error:
            problems.append(str(error))
            continue
        if key is None:
            return None, []
        keys.append(_digest(key))
    if problems:
        return None, problems
    record = _record_of(pictures.place)
    known = _read(record)
    new = [index for index, key in enumerate(keys) if key not in known]
    try:
        for index, seen in _inspected(pictures, new):
            if isinstance(seen, Facts):
                known[keys[index]] = (seen.content, int(seen.traits))
            else:
                problems.append(str(seen))
    finally:  # interrupted or not: what was found good need not be looked at again
        if new:
            _write(record, known)
    if problems:
        return None, problems
    facts = [known[key] for key in keys]
    contents = np.array([content for content, _ in facts], np.uint64)
    return Checked(contents, np.array([traits for _, traits in facts], np.uint8)), []


def _digest(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode(errors="surrogateescape"), digest_size=8).digest())


def _record_of(place: str) -> Path:
    return cache_folder() / "images" / f"{hashlib.sha256(place.encode(errors='surrogateescape')).hexdigest()[:16]}.npy"


def _read(record: Path) -> dict[int, tuple[int, int]]:
    try:
        stored = np.load(record)
    except (OSError, ValueError, EOFError):  # not there yet, or damaged: then everything is looked at
        return {}
    if stored.dtype != _RECORD:  # of another version
        return {}
    facts = zip(stored["picture"].tolist(), stored["traits"].tolist(), strict=True)
    return dict(zip(stored["key"].tolist(), facts, strict=True))


def _inspected(pictures: Pictures, indices: list[int]) -> Iterator[tuple[int, Facts | DataError]]:
    def look(index: int) -> Facts | DataError:
        try:
            return pictures.inspect(index)
        except DataError as error:
            return error

    said = time.monotonic()
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # Pillow lets go of Python's lock while it decodes
        for start in range(0, len(indices), AT_ONCE):
            part = indices[start : start + AT_ONCE]
            yield from zip(part, pool.map(look, part), strict=True)
            if time.monotonic() - said >= PROGRESS_SECONDS:
                said = time.monotonic()
                log.info(f"checking {pictures.place}: {start + len(part)} of {len(indices)} images are read")


def _write(record: Path, known: dict[int, tuple[int, int]]) -> None:
    record.parent.mkdir(parents=True, exist_ok=True)
    aside = record.with_name(f".{os.getpid()}-{record.name}")
    rows: Any = [(key, *facts) for key, facts in sorted(known.items())]
    try:
        np.save(aside, np.array(rows, _RECORD))
        aside.replace(record)
    finally:
        aside.unlink(missing_ok=True)
