"""Which files are the same, found by reading as little of them as tells: identity, size, a few pieces, then the content."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

PIECE = 2**16
"""Bytes of a piece."""
WHOLE = 2**26
"""Files up to this size are compared to the last byte. Of larger ones that agree in all else, so many bytes are compared, in
pieces that are spread evenly."""
THREADS = 16
"""Files may lie on a network, where each question takes a while."""


def file_contents(files: Sequence[Path]) -> NDArray[np.uint64]:
    """A number for each file: the same for files that are one, or have the same content; else different ones."""
    with ThreadPoolExecutor(min(THREADS, max(1, len(files)))) as pool:
        facts = list(pool.map(os.stat, files))
        groups: list[list[int]] = [list(range(len(files)))]
        steps: list[Callable[[int], Hashable]] = [
            lambda number: facts[number].st_size,
            lambda number: _digest(files[number], _spread(facts[number].st_size, 3)),
            lambda number: _digest(files[number], _spread(facts[number].st_size, WHOLE // PIECE)),
        ]
        one_file = _split(range(len(files)), [(each.st_dev, each.st_ino) for each in facts])
        groups = [[members[0] for members in one_file]]
        for step in steps:
            open_questions = [group for group in groups if len(group) > 1]
            groups = [group for group in groups if len(group) == 1]
            asked = [number for group in open_questions for number in group]
            answers = dict(zip(asked, pool.map(step, asked), strict=True))
            for group in open_questions:
                groups += _split(group, [answers[number] for number in group])
    same = {members[0]: members for members in one_file}
    numbers = np.zeros(len(files), np.uint64)
    for number, group in enumerate(sorted(groups, key=min)):
        for first in group:
            numbers[same[first]] = number
    return numbers


def _split(members: Iterable[int], by: Iterable[Hashable]) -> list[list[int]]:
    found: dict[Hashable, list[int]] = defaultdict(list)
    for member, key in zip(members, by, strict=True):
        found[key].append(member)
    return list(found.values())


def _spread(size: int, pieces: int) -> list[tuple[int, int]]:
    """Where so many pieces of a file begin and end, the first and the last of its bytes among them; all of a file that is not
    larger than they are together."""
    if size <= pieces * PIECE:
        return [(0, size)]
    starts = np.linspace(0, size - PIECE, pieces).astype(np.int64).tolist()
    return [(start, start + PIECE) for start in starts]


def _digest(file: Path, ranges: list[tuple[int, int]]) -> bytes:
    digest = blake2b(digest_size=16)
    with file.open("rb") as stream:
        for first, last in ranges:
            stream.seek(first)
            for start, end in pairwise([*range(first, last, 2**22), last]):
                digest.update(stream.read(end - start))
    return digest.digest()
