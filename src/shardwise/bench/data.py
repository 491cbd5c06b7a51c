"""Does the data keep up? Time to read, to collate, to move and to wait, for several numbers of workers."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from shardwise.config import Batching, Config
from shardwise.data import BatchedSamples, Reader, StepBatch, StepLoader
from shardwise.data.loader import Work
from shardwise.engine.monitor import MUCH_WAITING
from shardwise.engine.session import Session
from shardwise.errors import DataError

MOST_STEPS = 200
"""Of training, per number of workers, where more than the steps asked for are needed to see the loader wait."""


@dataclass(frozen=True)
class Costs:
    """Milliseconds per micro-batch in one process, and of the model's part of a step."""

    read: float
    collate: float
    move: float
    compute: float


@dataclass(frozen=True)
class Pace:
    """How the loader does with a number of workers."""

    workers: int
    samples_per_second: float
    """Of the loader alone, with nothing to wait for."""
    wait: float
    """Milliseconds per step that the training waits for it."""
    wait_share: float


@dataclass(frozen=True)
class Profile:
    batch_size: int
    cores: int
    device: str
    costs: Costs
    paces: list[Pace]
    verdict: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def profile_data(config: Config, workers: list[int], steps: int, cores: int) -> Profile:
    """On one device, as one rank of the run would have it."""
    with Session(config.on_one_device()) as session:
        session.prepare()
        costs = _costs(session, steps)
        paces = [_pace(session, number, steps) for number in workers]
    verdict = _verdict(costs, paces, cores, config.data.num_workers)
    return Profile(session.batching.batch_size, cores, session.world.device.type, costs, paces, verdict)


def _costs(session: Session, steps: int) -> Costs:
    """Each part of the way of a micro-batch, one after the other in this process."""
    reading, collating, moving, computing = (_Stopwatch(session.world.device) for _ in range(4))
    data, device = session.train_data, session.world.device
    together = _together(session, 0)
    reader = _reader(session)
    timed = replace(reader, collate=collating.around(reader.collate))
    if isinstance(data, BatchedSamples):
        read = reading.around(timed.read)
    else:
        timed = replace(timed, samples=_Timed(data, reading))
        read = timed.read
    first = next(iter(_loader(session, 0)))
    session.step(replace(first, micro=[micro.to(device) for micro in first.micro]))  # the first step takes longer
    # What would be asked for next, and has not been read yet.
    requests = itertools.islice(_loader(session, 0).requests.micro_batches(), together, together + steps)
    for request in requests:
        made = timed.micro_batches([read(Work(request.ids, (len(request.ids),), request.epoch))], [request])
        moved = [moving.around(micro.to)(device) for micro in made]
        computing.around(session.step)(StepBatch(moved))
    return Costs(*(watch.per(steps) for watch in (reading, collating, moving, computing)))


def _pace(session: Session, workers: int, steps: int) -> Pace:
    together = _together(session, workers)
    batches = iter(_loader(session, workers))
    for _ in range(together):  # the workers have started
        next(batches, None)
    began, samples = time.perf_counter(), 0
    for batch in itertools.islice(batches, max(steps, 3 * together)):
        samples += batch.samples
    rate = samples / (time.perf_counter() - began)
    del batches
    waits: list[float] = []
    wholes: list[float] = []
    steps_of_training: Iterator[StepBatch] = iter(_loader(session, workers))
    session.step(next(steps_of_training))
    while len(waits) < max(steps, min(together, MOST_STEPS)):
        began = time.perf_counter()
        step = next(steps_of_training, None)
        if step is None:
            break
        session.step(step)
        waits.append(step.wait)
        wholes.append(time.perf_counter() - began)
    if not waits:
        raise DataError("the training data is too short to measure: it makes one step or none")
    return Pace(workers, rate, statistics.mean(waits) * 1e3, sum(waits) / sum(wholes))


def _together(session: Session, workers: int) -> int:
    """Steps that are read in one go: the first of them waits for all, and the others for nothing."""
    return -(-_loader(session, workers).requests.at_once // session.batching.batch_size)


def _verdict(costs: Costs, paces: list[Pace], cores: int, configured: int) -> str:
    """One sentence: which it is, and what to set."""
    parts = {"reading": costs.read, "collating": costs.collate, "moving to the device": costs.move}
    slowest = max(parts, key=lambda name: parts[name])
    loading = sum(parts.values())
    now = min(paces, key=lambda pace: abs(pace.workers - configured))
    best = min(paces, key=lambda pace: (round(pace.wait_share, 2), pace.workers))
    what = (
        f"{slowest} is the largest part of loading ({parts[slowest]:.1f} of {loading:.1f} ms per micro-batch; the model "
        f"computes {costs.compute:.1f} ms per step)"
    )
    if now.wait_share <= MUCH_WAITING:
        return (
            f"The data keeps up: with {now.workers} workers {now.wait_share:.0%} of a step is waiting. {_upper(what)}."
        )
    if best.wait_share <= MUCH_WAITING:
        return (
            f"Set data.num_workers: {best.workers}: waiting falls from {now.wait_share:.0%} to {best.wait_share:.0%} of a "
            f"step. {_upper(what)}."
        )
    remedy = {
        "reading": "make a sample cheaper to read (a sharded copy of cells, data.cache for volumes, smaller image files), "
        "or use a machine with more cores per device",
        "collating": "make the task's collate cheaper, or leave more of it to the device",
        "moving to the device": "set data.pin_memory: true, or move smaller types",
    }[slowest]
    return (
        f"The data does not keep up: even with {best.workers} workers {best.wait_share:.0%} of a step is waiting, on "
        f"{cores} cores. {_upper(what)}: {remedy}."
    )


def _upper(text: str) -> str:
    return text[0].upper() + text[1:]


def _reader(session: Session) -> Reader:
    return Reader(session.train_data, session.task.collate, session.task.count, session.config.seed)


def _loader(session: Session, workers: int) -> StepLoader:
    return StepLoader(
        _reader(session),
        session.order(),
        Batching(1, session.batching.batch_size, 1),
        0,
        session.world.device,
        session.config.data.model_copy(update={"num_workers": workers}),
        epochs=1_000_000,  # as many as it takes
    )


class _Stopwatch:
    """Adds up the time spent in what it is wrapped around, with the device's part of it."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.total = device, 0.0

    def around(self, action: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            self._synchronise()
            began = time.perf_counter()
            result = action(*args)
            self._synchronise()
            self.total += time.perf_counter() - began
            return result

        return timed

    def per(self, times: int) -> float:
        """Milliseconds."""
        return self.total / times * 1e3

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class _Timed:
    """A data set that measures how long its samples take."""

    def __init__(self, samples: Any, watch: _Stopwatch) -> None:
        self.samples, self.watch = samples, watch

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.watch.around(self.samples.__getitem__)(index)
