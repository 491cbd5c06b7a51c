"""Every image is decoded once before training. Verdicts are kept, so that the next start only looks at what is new."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from shardwise.data.cache import cache_folder
from shardwise.errors import DataError
from shardwise.tasks.images.pictures import Pictures

log = logging.getLogger(__name__)

PROGRESS_SECONDS = 10.0
AT_ONCE = 256
SHOWN = 5


def check_images(*parts: Pictures) -> None:
    """Raises one error that names the images of all parts which cannot be read."""
    problems = [problem for pictures in parts for problem in _problems(pictures)]
    if problems:
        more = f"\n  and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        listed = "".join(f"\n  {problem}" for problem in problems[:SHOWN])
        raise DataError(
            f"{len(problems)} of {sum(map(len, parts))} images cannot be used. Replace or remove them:{listed}{more}"
        )


def _problems(pictures: Pictures) -> list[str]:
    keys = {index: _digest(key) for index in range(len(pictures)) if (key := pictures.key(index)) is not None}
    record = _record_of(pictures.place)
    known = _read(record)
    new = [index for index, key in keys.items() if key not in known]
    problems: list[str] = []
    try:
        for index, problem in _verdicts(pictures, new):
            if problem is None:
                known.add(keys[index])
            else:
                problems.append(problem)
    finally:  # interrupted or not: what was found good need not be looked at again
        if new:
            _write(record, known)
    return problems


def _digest(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest())


def _record_of(place: str) -> Path:
    return cache_folder() / "images" / f"{hashlib.sha256(place.encode()).hexdigest()[:16]}.npy"


def _read(record: Path) -> set[int]:
    try:
        return set(np.load(record).tolist())
    except (OSError, ValueError, EOFError):  # not there yet, or damaged: then everything is looked at
        return set()


def _verdicts(pictures: Pictures, indices: list[int]) -> Iterator[tuple[int, str | None]]:
    def look(index: int) -> str | None:
        try:
            pictures.open(index, reduced=True)
        except DataError as error:
            return str(error)
        return None

    said = time.monotonic()
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # Pillow lets go of Python's lock while it decodes
        for start in range(0, len(indices), AT_ONCE):
            part = indices[start : start + AT_ONCE]
            yield from zip(part, pool.map(look, part), strict=True)
            if time.monotonic() - said >= PROGRESS_SECONDS:
                said = time.monotonic()
                log.info(f"checking {pictures.place}: {start + len(part)} of {len(indices)} images are read")


def _write(record: Path, digests: set[int]) -> None:
    record.parent.mkdir(parents=True, exist_ok=True)
    aside = record.with_name(f".{os.getpid()}-{record.name}")
    try:
        np.save(aside, np.array(sorted(digests), dtype=np.uint64))
        aside.replace(record)
    finally:
        aside.unlink(missing_ok=True)
