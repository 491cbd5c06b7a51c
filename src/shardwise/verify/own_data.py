"""The data, and the model, as each rank makes them by itself: in an interpreter of its own, with another hash seed, a little
later than the others, with the files of every folder listed in another order, and the samples read in another order.

A data set that keeps to what it is told gives the same samples all the same.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from shardwise.config.seeds import Purpose
from shardwise.data import Reader
from shardwise.data.seeding import seed_everything
from shardwise.engine.parallel_init import build_initial_model
from shardwise.engine.run import Run
from shardwise.parallel.weights import build_shape, first_unlike, structure_of
from shardwise.tasks import Task
from shardwise.verify.causes import Cause
from shardwise.verify.contents import contents_of, first_difference, nearly_the_same, sketches_of
from shardwise.verify.report import Check, Finding, failed, passed

MOST_SAMPLES = 400
"""Of each part, evenly spread."""
LONGEST = 10.0
"""Seconds for reading them."""
LATER = 1.1
"""Seconds by which a rank begins after the one before it: a clock that counts in seconds shows another time."""
FEW = 20
"""Samples that are read first, to see how long each takes."""
NAME = "data of each rank"

Contents = tuple[dict[str, str], dict[str, list[float]]]
"""Of a sample: the digest of everything in it, and a sketch of what is floating-point numbers."""
Listing = str
"""natural, reversed, or mixed by a number."""


def look_at_own(run: Run, task: Task, wait: float, order: int) -> dict[str, Any]:
    """On this rank: how many samples there are, and fingerprints of what is in some of them; and what the model consists of."""
    time.sleep(wait)
    seed_everything(run.config.seed, Purpose.DATA)
    run.world.on_each_machine(task.prepare_data)
    found = look_at(run, task, task.train_data(), task.valid_data(), order)
    model = build_shape(lambda: build_initial_model(task, run.config.seed))
    return {**found, "model": structure_of(model)}


def look_at(run: Run, task: Task, train: Any, valid: Any, order: int, *, few: bool = False) -> dict[str, Any]:
    """How many samples there are, and what is in some of them. `few`: only in some that tell."""
    parts = {"training": train, "validation": valid}
    sizes = {name: None if data is None else len(data) for name, data in parts.items()}
    seen: dict[str, dict[int, Contents]] = {}
    for name, data in parts.items():
        count = task.count if name == "training" else lambda _: 0
        reader = Reader(data, task.collate, count, run.config.seed, name=name)
        row = _spread(sizes[name] or 0)
        began = time.monotonic()
        seen[name] = _read(reader, row[:FEW], order)
        if few:
            continue
        each = (time.monotonic() - began) / FEW
        # Every rank reads a beginning of the same row: they are compared in what they have in common.
        seen[name] |= _read(reader, row[FEW:][: int(LONGEST / max(each, 1e-9))], order)
    return {"sizes": sizes, "samples": seen}


def _read(reader: Reader, indices: Sequence[int], order: int) -> dict[int, Contents]:
    mixed = random.Random(order).sample(indices, len(indices))
    return {index: _contents(reader.micro_batch(np.array([index]))) for index in mixed}


def _contents(inputs: Any) -> Contents:
    return contents_of(inputs), sketches_of(inputs)


def _unlike(one: Contents, other: Contents) -> str | None:
    """The place of the first difference, in words. One in the last digits is none: how a library adds up may depend on where in
    memory its input lies."""
    (hashes, sketches), (others, their_sketches) = one, other
    near = {
        place for place, sketch in sketches.items() if nearly_the_same(sketch, their_sketches.get(place, [math.inf]))
    }
    return first_difference(
        {place: each for place, each in hashes.items() if place not in near},
        {place: each for place, each in others.items() if place not in near},
    )


def _spread(size: int) -> list[int]:
    """Each beginning of it is spread over all."""
    some = (
        range(size) if size <= MOST_SAMPLES else np.unique(np.linspace(0, size - 1, MOST_SAMPLES).astype(int)).tolist()
    )
    return random.Random(0).sample(list(some), len(some))


def difference(records: Sequence[dict[str, Any]]) -> tuple[int, str] | None:
    """The first rank whose data are not rank 0's, and what is other about them."""
    first = records[0]
    for rank, mine in enumerate(records[1:], start=1):
        for part, size in first["sizes"].items():
            if mine["sizes"][part] != size:
                return rank, f"{mine['sizes'][part]} {part} samples, where rank 0 has {size}"
            for index, contents in first["samples"][part].items():
                other = mine["samples"][part].get(index)
                if other is not None and (place := _unlike(contents, other)):
                    return rank, f"another {part} sample {index} than rank 0 ({place})"
    return None


def check_data(
    records: Sequence[dict[str, Any]],
    alone: dict[str, Any],
    causes: Iterable[tuple[Cause, str]] = (),
    *,
    changes: bool = False,
) -> Check:
    """`alone`: of a process without other ranks. `causes`: found by experiments, if the ranks have different data. `changes`: the
    data that `alone` had read become others by reading, or by training on them."""
    found = difference(records)
    if found is None and (unlike := difference([alone, records[0]])):
        text, cause = f"{len(records)} ranks make {unlike[1].replace('rank 0', 'one process')}", Cause.DATA_CHANGE
        if not changes:
            text, cause = f"{text}, without other ranks beside it", Cause.DATA_BY_RANK
        return failed("coverage", NAME, Finding(cause, text))
    if found is None:
        numbers = " and ".join(
            f"{len(set.intersection(*(set(each['samples'][part]) for each in records)))} of {size} {part} samples"
            for part, size in records[0]["sizes"].items()
            if size
        )
        return passed(
            "coverage",
            NAME,
            f"{numbers} are the same in {len(records)} interpreters, each with a hash seed, an order of files and of "
            "samples, and a start of its own",
        )
    rank, what = found
    cause, how = next(iter(causes), (Cause.DATA_BY_RANK, ""))
    return failed("coverage", NAME, Finding(cause, f"rank {rank} makes {what}{how}", rank=rank))


def check_models(records: Sequence[dict[str, Any]]) -> Check:
    models = [record["model"] for record in records]
    found = first_unlike(models)
    if found is None:
        return passed(
            "coverage",
            "model of each rank",
            f"{len(models[0])} parameters and buffers, in the same order in each of them",
        )
    return failed(
        "coverage", "model of each rank", Finding(Cause.MODELS_DIFFER, f"on rank {found[0]}, {found[1]}", rank=found[0])
    )


@contextmanager
def listed_in(order: Listing) -> Iterator[None]:
    """Folders give their files in this order, which is no other than a file system may choose."""
    if order == "natural":
        yield
        return
    listdir, scandir = os.listdir, os.scandir
    os.listdir = lambda path=".": _ordered(listdir(path), order, str)
    os.scandir = partial(_Entries, scandir, order)  # type: ignore[assignment]
    try:
        yield
    finally:
        os.listdir, os.scandir = listdir, scandir


class _Entries:
    """What os.scandir gives."""

    def __init__(self, scandir: Any, order: Listing, path: Any = ".") -> None:
        self._open = scandir(path)
        self._entries = iter(_ordered(list(self._open), order, lambda entry: str(entry.name)))

    def __iter__(self) -> Iterator[os.DirEntry[str]]:
        return self._entries

    def __next__(self) -> os.DirEntry[str]:
        return next(self._entries)

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._open.close()


def _ordered(entries: list[Any], order: Listing, name: Any) -> list[Any]:
    entries = sorted(entries, key=name, reverse=True)
    if order != "reversed":
        random.Random(order).shuffle(entries)
    return entries
