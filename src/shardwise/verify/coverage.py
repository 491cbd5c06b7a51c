"""Whether every sample is trained on exactly once per epoch, over ranks and workers, in a new order each time, and none
of them is validated on."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from shardwise.config import Batching, Config, DataBlock
from shardwise.data import BatchedSamples, Cursor, GlobalOrder, Reader, StepLoader
from shardwise.data.order import Indices
from shardwise.engine.run import Run
from shardwise.verify.causes import Cause
from shardwise.verify.contents import contents_of, first_difference, values_of
from shardwise.verify.formatting import listed
from shardwise.verify.measure import PROVES
from shardwise.verify.report import Check, Finding, failed, noted, passed, unproved
from shardwise.verify.run_spec import Plan, RunSpec

_passed, _noted = partial(passed, "coverage"), partial(noted, "coverage")
EPOCHS = 2
MOST_SAMPLES = 50_000
"""Of a larger data set, the loader hands out this many from the end of each epoch."""
MOST_COMPARED = 1_000
"""Samples of each part whose contents are compared."""
FEW_KINDS = 0.3
"""Where fewer of the samples are different ones, nothing is made of one that is like another in the next epoch."""
MOST_DRAWN = 100
"""Samples that are read once more, for the second epoch."""
LONGEST = 10.0
"""Seconds for each of these."""
TELLING = 0.9
"""An array that is different in so many of the training samples tells them apart."""
FEWEST_BYTES = 8
"""Shorter arrays are labels or numbers, not contents."""


@dataclass
class Handed:
    """What the loaders of all ranks handed out, with so many workers."""

    workers: int
    missing: list[list[int]]
    """Per epoch: samples of the order that nobody got."""
    twice: list[list[int]]
    """Per epoch: samples that somebody got again."""
    same_as_without: bool = True


@dataclass
class Overlap:
    """Of training and validation. Pairs are (training sample, validation sample)."""

    train: int = 0
    valid: int = 0
    """Samples that were compared."""
    kinds: float = 1.0
    """Of the training samples, the share that is different from all before it."""
    whole: list[tuple[int, int]] = field(default_factory=list)
    """Pairs that hold the same."""
    beyond_chance: list[tuple[int, int]] = field(default_factory=list)
    """Pairs that share what tells training samples apart, more of them than training samples share it with each other."""
    place: str = ""
    """Where these are the same; empty: everywhere."""


@dataclass
class Coverage:
    samples: int
    looked_at: int
    epochs: int
    handed: list[Handed] = field(default_factory=list)
    same_order: bool = False
    """The second epoch has the order of the first."""
    whole_order: bool = True
    """The order itself names every sample once."""
    overlap: Overlap = field(default_factory=Overlap)
    read: int = 0
    """Training samples that were compared with each other."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    """Pairs of training samples with the same contents."""
    by_workers: str = ""
    """Where the samples are others when loader workers read them, as the config has it; empty where they are not."""
    drawn: list[tuple[int, int]] = field(default_factory=list)
    """Pairs: in the second epoch the first one is what the other was in the first epoch."""


def cover(run: Run, asked: Config, spec: RunSpec) -> Coverage:
    """In one process: the loaders of all ranks, one after the other, over samples that are only numbers."""
    assert spec.plan is not None
    batching, order = spec.plan.batching, run.order()
    samples = order.samples
    looked_at = min(samples, MOST_SAMPLES)
    result = Coverage(samples, looked_at, EPOCHS)
    epochs = [order.part(epoch, 0, samples) for epoch in range(EPOCHS)]
    result.whole_order = all(np.array_equal(np.sort(ids), np.arange(samples)) for ids in epochs)
    result.same_order = samples > 3 and bool(np.array_equal(epochs[0], epochs[1]))
    numbers = _numbers_for(run, order)
    before: list[list[list[int]]] | None = None
    for workers in sorted({0, run.config.data.num_workers, 2}):
        found = [_handed_out(numbers, order, batching, rank, workers, run, looked_at) for rank in range(batching.world)]
        handed = _judged(found, epochs, looked_at, workers)
        handed.same_as_without = before is None or found == before
        before = before or found
        result.handed.append(handed)
    result.by_workers = _changed_by_workers(run, order)
    result.overlap = _overlap(run)
    result.read, result.copies, result.drawn = _copies(run)
    return result


def check_own_batches(ranks: Sequence[Sequence[dict[str, Any]]], plan: Plan) -> Iterator[Check]:
    """A loop of one's own may leave out a batch that it was given, or train on it again. `ranks`: what each wrote down of its
    steps. Nothing is said of a loop that takes each as it comes."""
    steps = list(zip(*ranks, strict=False))
    last, first = max(rows[0]["epoch"] for rows in steps), min(rows[0]["epoch"] for rows in steps)
    seen: dict[int, list[int]] = {}
    for rows in steps:
        ids = seen.setdefault(rows[0]["epoch"], [])
        mine = [index for row in rows for index in row["ids"]]
        if again := set(ids).intersection(mine):
            yield _own_batches(
                f"step {rows[0]['step']} trains once more on samples of its epoch: {listed(sorted(again))}"
            )
            return
        ids += mine
    for epoch, ids in seen.items():
        wanted = plan.window - (plan.start if epoch == first else 0)
        if epoch != last and len(ids) < wanted:  # the last one goes on after these steps
            yield _own_batches(f"of the {wanted} samples of an epoch, the program trains on {len(ids)}")
            return


def _own_batches(text: str) -> Check:
    why = (
        "The program decides that by itself. If it decides by what a checkpoint does not carry (a running mean, a list, a "
        "counter), it decides otherwise after a resume. To be proved, it takes every batch of session.batches() once"
    )
    return unproved("coverage", "its own batches", text, why)


def check_coverage(coverage: Coverage, ranks: int) -> list[Check]:
    return [_once(coverage, ranks), _distinct(coverage), _reshuffled(coverage), _disjoint(coverage)]


def _once(coverage: Coverage, ranks: int) -> Check:
    name = "each sample once"
    for handed in coverage.handed:
        where = f"over {ranks} ranks with {handed.workers} workers"
        for epoch, (missing, twice) in enumerate(zip(handed.missing, handed.twice, strict=True)):
            if twice:
                text = f"epoch {epoch}, {where}: {len(twice)} samples come more than once, {twice[:10]} for example"
                text += f"; {len(missing)} of {coverage.samples} never" if missing else ""
                return _failed(name, Cause.REPEATED, text)
            if missing:
                few = f"{len(missing)} of {coverage.samples} samples"
                text = f"epoch {epoch}, {where}: {few} never come, {missing[:10]} for example"
                return _failed(name, Cause.DROPPED, text)
        if not handed.same_as_without:
            return _failed(
                name, Cause.WORKERS, f"with {handed.workers} workers a rank gets other samples than with none"
            )
    if coverage.by_workers:
        return _failed(name, Cause.WORKERS, coverage.by_workers)
    if not coverage.whole_order:
        return _failed(name, Cause.REPEATED, "the order of an epoch does not name every sample exactly once")
    workers = ", ".join(str(handed.workers) for handed in coverage.handed)
    some = "" if coverage.looked_at == coverage.samples else f", the last {coverage.looked_at} through the loader"
    text = (
        f"{coverage.samples} samples{some}, {coverage.epochs} epochs, over {ranks} rank(s), with {workers} workers each"
    )
    return _passed(name, text)


def _distinct(coverage: Coverage) -> Check:
    name = "samples distinct"
    if coverage.drawn:
        index, other = coverage.drawn[0]
        text = (
            f"{len(coverage.drawn)} of {min(coverage.read, MOST_DRAWN)} samples are another one in the second epoch: {index} is "
            f"then what {other} was in the first. The data set draws which one it gives, so some come twice and some never"
        )
        return _failed(name, Cause.REPEATED, text)
    few = len(coverage.copies) <= PROVES * coverage.read
    text = f"{coverage.read} of {coverage.samples} training samples compared with each other"
    if not coverage.copies:
        return _passed(name, f"{text}: no two are the same")
    index, other = coverage.copies[0]
    text += f": {len(coverage.copies)} are copies of another, {index} of {other} for example"
    if few:
        return _noted(name, text)
    why = (
        f"That is more than {PROVES:.0%}, and looks like an index that gives some samples twice and others never. Without copies "
        "in the data it would be proved; if they are meant to be there, nothing is wrong"
    )
    return unproved("coverage", name, text, why)


def _reshuffled(coverage: Coverage) -> Check:
    name = "new order each epoch"
    if coverage.same_order:
        return _failed(name, Cause.NOT_RESHUFFLED, "the second epoch has the samples in the order of the first")
    return _passed(name, "the second epoch has another order than the first")


def _disjoint(coverage: Coverage) -> Check:
    name, found = "validation disjoint", coverage.overlap
    if not found.valid:
        return _noted(name, "the task has no validation data")
    text = f"{found.valid} validation samples compared with {found.train} training samples by the arrays in them"
    if found.beyond_chance:
        where = f", at {found.place.removeprefix('.')}" if found.place else ""
        text += f": {len(found.beyond_chance)} are in both{where}; {_pairs(found.beyond_chance)}"
        return _failed(name, Cause.OVERLAP, text)
    if not found.whole:
        return _passed(name, f"{text}: none is in both")
    text += f": {len(found.whole)} are in both; {_pairs(found.whole)}"
    if len(found.whole) <= found.valid // 100 or found.kinds < FEW_KINDS:  # data as it is found has copies in it
        return _noted(name, text)
    why = (
        "Training samples are as often copies of each other, so it may be chance; or the data were split before copies were "
        "taken out of them. Without copies in the training data it would be proved"
    )
    return unproved("coverage", name, text, why)


def _pairs(pairs: list[tuple[int, int]]) -> str:
    return "validation sample " + ", ".join(f"{held} is training sample {index}" for index, held in pairs[:3])


def _failed(name: str, cause: Cause, text: str) -> Check:
    return failed("coverage", name, Finding(cause, text))


def _handed_out(
    numbers: Any, order: GlobalOrder, batching: Batching, rank: int, workers: int, run: Run, looked_at: int
) -> list[list[int]]:
    """Per epoch, the samples that this rank gets."""
    options = DataBlock(num_workers=workers)
    reader = Reader(numbers, lambda ids: torch.tensor(ids), len, run.config.seed)
    per_epoch: list[list[int]] = [[] for _ in range(EPOCHS)]
    # A data set that is looked at whole goes through one loader, as in a training; else every epoch's end has its own.
    starts = range(EPOCHS) if looked_at < order.samples else range(1)
    for first in starts:
        start = Cursor(first, order.samples - looked_at)
        until = first + 1 if looked_at < order.samples else EPOCHS
        device = torch.device("cpu")
        for batch in StepLoader(reader, order, batching, rank, device, options, start=start, epochs=until):
            for micro in batch.micro:
                if not micro.request.borrowed:
                    per_epoch[micro.request.epoch] += micro.inputs.tolist()
    return per_epoch


def _judged(found: list[list[list[int]]], epochs: list[Indices], looked_at: int, workers: int) -> Handed:
    missing, twice = [], []
    for epoch, ids in enumerate(epochs):
        expected = ids[len(ids) - looked_at :]
        got = np.array([index for rank in found for index in rank[epoch]], dtype=np.int64)
        values, times = np.unique(got, return_counts=True)
        missing.append(np.setdiff1d(expected, got).tolist())
        twice.append(sorted({*values[times > 1].tolist(), *np.setdiff1d(got, expected).tolist()}))
    return Handed(workers, missing, twice)


def _numbers_for(run: Run, order: GlobalOrder) -> Any:
    data = run.train_data
    return _BatchedNumbers(data) if isinstance(data, BatchedSamples) else range(order.samples)


class _BatchedNumbers(BatchedSamples):
    """Makes whole micro-batches, like the data that it stands for."""

    def __init__(self, data: BatchedSamples) -> None:
        self.size, self.at_once, self.in_regions = len(data), data.at_once, data.in_regions

    def __len__(self) -> int:
        return self.size

    def read(self, ids: Indices, epoch: int) -> Any:
        return torch.from_numpy(ids.copy())

    def join(self, parts: list[Any]) -> Any:
        return torch.cat(parts)

    def take_apart(self, batch: Any, sizes: list[int]) -> list[Any]:
        return list(batch.split(sizes))


def _changed_by_workers(run: Run, order: GlobalOrder) -> str:
    """Some real samples, one at a time, as the main process reads them and as the configured workers do."""
    workers = run.config.data.num_workers
    if not workers:
        return ""
    reader = Reader(run.train_data, run.task.collate, run.task.count, run.config.seed)
    alone = Batching(world=1, batch_size=1, accumulation=1)

    def read(options: DataBlock) -> dict[int, dict[str, str]]:
        began, found = time.monotonic(), {}
        for batch in StepLoader(reader, order, alone, 0, torch.device("cpu"), options):
            for micro in batch.micro:
                found[int(micro.request.ids[0])] = contents_of(micro.inputs)
            if len(found) >= MOST_DRAWN or time.monotonic() - began > LONGEST:
                break
        return found

    without, others = read(run.config.data.model_copy(update={"num_workers": 0})), read(run.config.data)
    both = [index for index in without if index in others]
    for index in both:
        if place := first_difference(without[index], others[index]):
            return (
                f"read by one of {workers} loader workers, sample {index} is another than read without, at {place}: what the "
                "data set gives follows from the worker that reads it"
            )
    return ""


def _overlap(run: Run) -> Overlap:
    """Samples of the two parts that hold the same, or share an array that tells the samples of the training data apart.

    An array, because a sample may have a number of its own beside what it holds; telling them apart, because a mask of ones does
    not. What is drawn anew at every reading (augmentation, masking) hides a copy from this.
    """
    if run.valid_data is None or not len(run.valid_data):
        return Overlap()
    mine, held = _read(run.train_data), _read(run.valid_data)
    found = Overlap(len(mine), len(held))
    places = dict.fromkeys(place for contents in mine.values() for place in contents)
    for place in (None, *places):  # None: all of a sample
        seen: dict[str, list[int]] = {}
        for index, contents in mine.items():
            seen.setdefault(_at(contents, place), []).append(index)
        if place is not None and len(seen) <= TELLING * len(mine):
            continue
        shared = [(seen[at][0], index) for index, contents in held.items() if (at := _at(contents, place)) in seen]
        if place is None:
            found.whole, found.kinds = shared, len(seen) / max(1, len(mine))
        twins = sum(len(indices) for indices in seen.values() if len(indices) > 1) / max(1, len(mine)) * len(held)
        by_chance = twins + 3 * math.sqrt(twins) + len(held) // 100
        if len(shared) > by_chance and len(shared) > len(found.beyond_chance):
            found.beyond_chance, found.place = shared, place or ""
    return found


def _at(contents: dict[str, str], place: str | None) -> str:
    """Where a sample has nothing at a place, it is like no other there."""
    return repr(sorted(contents.items())) if place is None else contents.get(place, f"none {id(contents)}")


def _read(data: Any) -> dict[int, dict[str, str]]:
    """Of some samples, what they hold."""
    began, found = time.monotonic(), {}
    for index in _some(len(data)):
        found[index] = _contents(data, index)
        if time.monotonic() - began > LONGEST:
            break
    return found


def _copies(run: Run) -> tuple[int, list[tuple[int, int]], list[tuple[int, int]]]:
    """How many training samples were compared; which are the same, and which are another one in the next epoch."""
    data, task = run.train_data, run.task
    reader = Reader(data, task.collate, task.count, run.config.seed)
    began, copies = time.monotonic(), []
    read: dict[int, str] = {}
    first: dict[str, int] = {}
    for index in _some(len(data)):
        contents = read[index] = _whole(reader.micro_batch(np.array([index])))
        if first.setdefault(contents, index) != index:
            copies.append((index, first[contents]))
        if time.monotonic() - began > LONGEST:
            break
    drawn: list[tuple[int, int]] = []
    if len(first) < FEW_KINDS * len(read):  # by chance, one is like another
        return len(read), copies, drawn
    for index in list(read)[:MOST_DRAWN]:
        again = _whole(reader.micro_batch(np.array([index]), epoch=1))
        if again != read[index] and again in first:
            drawn.append((index, first[again]))
        if time.monotonic() - began > 2 * LONGEST:
            break
    often = len(drawn) >= FEW_KINDS * min(len(read), MOST_DRAWN)
    return len(read), copies, drawn if often else []


def _whole(inputs: Any) -> str:
    return repr(sorted(contents_of(inputs).items()))


def _some(size: int) -> list[int]:
    """All, or half of them side by side and half of them spread."""
    if size <= MOST_COMPARED:
        return list(range(size))
    half = MOST_COMPARED // 2
    return [*range(half), *np.unique(np.linspace(half, size - 1, half).astype(int)).tolist()]


def _contents(data: Any, index: int) -> dict[str, str]:
    """A fingerprint of every array in the sample, by its place there."""
    torch.manual_seed(0)
    sample = data.read(np.array([index]), 0) if isinstance(data, BatchedSamples) else data[index]
    return values_of(sample, FEWEST_BYTES)
