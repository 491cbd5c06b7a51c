"""Whether every sample is trained on exactly once per epoch, over ranks and workers, in a new order each time, and none
of them is validated on."""

from __future__ import annotations

import time
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
from shardwise.verify.contents import contents_of
from shardwise.verify.measure import PROVES
from shardwise.verify.report import Check, Finding, failed, noted, passed, unproved
from shardwise.verify.run_spec import RunSpec

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
class Coverage:
    samples: int
    looked_at: int
    epochs: int
    handed: list[Handed] = field(default_factory=list)
    same_order: bool = False
    """The second epoch has the order of the first."""
    whole_order: bool = True
    """The order itself names every sample once."""
    compared: tuple[int, int] = (0, 0)
    overlap: list[tuple[int, int]] = field(default_factory=list)
    """Pairs (training sample, validation sample) with the same contents."""
    read: int = 0
    """Training samples that were compared with each other."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    """Pairs of training samples with the same contents."""
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
    result.compared, result.overlap = _overlap(run)
    result.read, result.copies, result.drawn = _copies(run)
    return result


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
    name = "validation disjoint"
    train, valid = coverage.compared
    if not valid:
        return _noted(name, "the task has no validation data")
    compared = f"{valid} validation samples compared with {train} training samples by the arrays in them"
    if not coverage.overlap:
        return _passed(name, f"{compared}: none is in both")
    pairs = ", ".join(f"{held} is training sample {index}" for index, held in coverage.overlap[:3])
    text = f"{compared}: {len(coverage.overlap)} are in both; validation sample {pairs}"
    if len(coverage.overlap) <= valid // 100:  # data as it is found has copies in it
        return _noted(name, text)
    return _failed(name, Cause.OVERLAP, text)


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


def _overlap(run: Run) -> tuple[tuple[int, int], list[tuple[int, int]]]:
    """Samples of the two parts that have an array in common which tells the samples of the training data apart.

    An array, because a number may be a label or a count from 0 in both; telling them apart, because a mask of ones does
    not. What is drawn anew at every reading (augmentation, masking) hides a copy from this.
    """
    train, valid = run.train_data, run.valid_data
    if valid is None or not len(valid):
        return (0, 0), []
    mine, held = _some(len(train)), _some(len(valid))
    seen: dict[str, dict[str, int]] = {}
    began = time.monotonic()
    for number, index in enumerate(mine):
        if time.monotonic() - began > LONGEST:
            mine = mine[:number]
            break
        for place, contents in _contents(train, index).items():
            seen.setdefault(place, {}).setdefault(contents, index)
    telling = {place: found for place, found in seen.items() if len(found) > 0.9 * len(mine)}
    pairs = []
    for number, index in enumerate(held):
        if time.monotonic() - began > 2 * LONGEST:
            held = held[:number]
            break
        found = _contents(valid, index)
        pairs += [(telling[p][found[p]], index) for p in telling if p in found and found[p] in telling[p]][:1]
    return (len(mine), len(held)), pairs


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
    return contents_of(sample, FEWEST_BYTES)
