"""From the global order to micro-batches on the device: workers, pinned memory, the next step moved ahead.

A worker gets whole micro-batches to make, or a fixed part of each, so that the number of workers cannot change what is
in them. What is random in a sample (augmentation, masking) is seeded by (seed, epoch, sample): it does not depend on
who reads it.
"""

from __future__ import annotations

import itertools
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from shardwise.config import Batching, DataBlock
from shardwise.config.seeds import Purpose
from shardwise.data.handover import as_room_problem, hand_over, require_room_for_workers, take_over
from shardwise.data.order import Cursor, GlobalOrder, Indices, cut
from shardwise.data.seeding import generators_kept, seed_host
from shardwise.data.tensor_bundle import TensorBundle
from shardwise.errors import DataError, one_line


class Samples(Protocol):
    """A data set: it has a length, and sample i is always the same sample."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


class BatchedSamples(ABC):
    """A data set that makes whole micro-batches itself, where one sample at a time would be slow."""

    origin: str = ""
    """What the samples are numbered by, where several copies of the same data number them differently."""
    at_once: int = 1024
    """How many samples to read in one go, of several micro-batches if those are smaller."""
    in_regions: bool = False
    """A global batch is sorted by place in the file, and every worker reads its own part of each micro-batch: so no
    two ranks or workers read the same region."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, ids: Indices, epoch: int) -> Any:
        """The batch of these samples. What is random in a sample must follow from (seed, epoch, sample)."""

    @abstractmethod
    def join(self, parts: list[Any]) -> Any:
        """Several such batches as one."""

    @abstractmethod
    def take_apart(self, batch: Any, sizes: list[int]) -> list[Any]:
        """One such batch as several, of these sizes: each as `read` would have made it."""

    def finish(self, batch: Any) -> Any:
        """A micro-batch whose parts are together, as the model takes it. Default: as it is."""
        return batch

    def order(self, seed: int) -> GlobalOrder:
        return GlobalOrder(len(self), seed)


@dataclass(frozen=True)
class Request:
    """What a rank asks for: one micro-batch. `borrowed`: it has no sample of its own and counts nothing."""

    ids: Indices
    epoch: int
    borrowed: bool
    last_of_step: bool
    after: Cursor
    step_samples: int


@dataclass
class MicroBatch:
    inputs: Any
    count: int
    """What the loss will be divided by: samples, tokens or voxels of this micro-batch. 0 when borrowed."""
    request: Request

    def idle(self) -> MicroBatch:
        """The same inputs, for a rank that must compute something and has nothing to count."""
        return replace(self, count=0, request=replace(self.request, borrowed=True))

    def pin_memory(self) -> MicroBatch:
        return replace(self, inputs=_map_tensors(self.inputs, lambda tensor: tensor.pin_memory()))

    def to(self, device: torch.device) -> MicroBatch:
        return replace(self, inputs=_map_tensors(self.inputs, lambda tensor: tensor.to(device, non_blocking=True)))

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        def record(tensor: torch.Tensor) -> torch.Tensor:
            tensor.record_stream(stream)
            return tensor

        _map_tensors(self.inputs, record)


@dataclass
class StepBatch:
    """This rank's share of one global batch: its micro-batches, and where the cursor stands afterwards."""

    micro: list[MicroBatch] = field(default_factory=list)
    wait: float = 0.0
    """Seconds that the loop waited for it."""

    @property
    def count(self) -> int:
        return sum(micro.count for micro in self.micro)

    @property
    def ids(self) -> list[int]:
        return [index for micro in self.micro if not micro.request.borrowed for index in micro.request.ids.tolist()]

    @property
    def samples(self) -> int:
        """Samples of the whole step, over all ranks."""
        return self.micro[-1].request.step_samples

    @property
    def epoch(self) -> int:
        return self.micro[-1].request.epoch

    @property
    def after(self) -> Cursor:
        return self.micro[-1].request.after


@dataclass(frozen=True)
class Work:
    """What one worker is given: the samples of one micro-batch after the other, or its piece of each."""

    ids: Indices
    sizes: tuple[int, ...]
    epoch: int

    @property
    def parts(self) -> list[Indices]:
        edges = itertools.accumulate(self.sizes, initial=0)
        return [self.ids[first:last] for first, last in itertools.pairwise(edges)]


@dataclass(frozen=True)
class Repeated:
    """Samples to be read beside the loop, so many times over. Of another `draw`, collate draws other random numbers."""

    ids: Indices
    times: int
    epoch: int
    draw: int = 0


@dataclass
class Loaded:
    """What it made of it."""

    sizes: tuple[int, ...]
    counts: list[int]
    inputs: Any
    """A list with the inputs of each micro-batch; of BatchedSamples, one batch of them all; from a worker, packed."""

    def pin_memory(self) -> Loaded:
        pinned = (
            self.inputs.pin_memory()
            if isinstance(self.inputs, TensorBundle)
            else _map_tensors(self.inputs, lambda tensor: tensor.pin_memory())
        )
        return replace(self, inputs=pinned)


@dataclass
class Reader:
    """How a data set becomes micro-batches: which samples, put together how, counted how."""

    samples: Samples | BatchedSamples
    collate: Callable[[list[Any]], Any]
    count: Callable[[Any], int]
    seed: int
    name: str = "training"

    def read(self, work: Work) -> Loaded:
        if isinstance(self.samples, BatchedSamples):
            whole = self._batch(self.samples, work)
            inputs = self._taken_apart(work.sizes, whole)
        else:
            whole = inputs = [self._collated(self.samples, part.tolist(), work.epoch) for part in work.parts]
        # A micro-batch smaller than the number of workers leaves some without samples.
        counts = [int(self.count(each)) if size else 0 for size, each in zip(work.sizes, inputs, strict=True)]
        return Loaded(work.sizes, counts, whole)

    def micro_batch(self, ids: Indices, epoch: int = 0) -> Any:
        """The inputs of one micro-batch of these samples, as a step of this epoch gets them: for a look ahead."""
        loaded = self.read(Work(ids, (len(ids),), epoch))
        return self._joined(self._taken_apart(loaded.sizes, loaded.inputs))

    def repeated(self, wanted: Repeated) -> Any:
        """The inputs of one micro-batch of these samples."""
        if not isinstance(self.samples, BatchedSamples):
            return self._collated(self.samples, np.tile(wanted.ids, wanted.times).tolist(), wanted.epoch, wanted.draw)
        # Joined, as what several workers read is: a file may not give the same row twice in one read.
        work = Work(wanted.ids, (len(wanted.ids),), wanted.epoch)
        return self._joined([self._batch(self.samples, work) for _ in range(wanted.times)])

    def micro_batches(self, pieces: list[Loaded], requests: Iterable[Request]) -> list[MicroBatch]:
        """From what every worker made of its piece of each."""
        inputs = [self._taken_apart(piece.sizes, take_over(piece.inputs)) for piece in pieces]
        micro = []
        for position, request in enumerate(requests):
            filled = [each[position] for each, piece in zip(inputs, pieces, strict=True) if piece.sizes[position]]
            count = 0 if request.borrowed else sum(piece.counts[position] for piece in pieces)
            micro.append(MicroBatch(self._joined(filled), count, request))
        return micro

    def _joined(self, pieces: list[Any]) -> Any:
        if not isinstance(self.samples, BatchedSamples):
            return pieces[0]
        return self.samples.finish(self.samples.join(pieces) if len(pieces) > 1 else pieces[0])

    def _taken_apart(self, sizes: tuple[int, ...], inputs: Any) -> list[Any]:
        if not isinstance(self.samples, BatchedSamples):
            return list(inputs)
        return self.samples.take_apart(inputs, list(sizes)) if any(sizes) else [None] * len(sizes)

    def _batch(self, samples: BatchedSamples, work: Work) -> Any:
        try:
            return samples.read(work.ids, work.epoch) if len(work.ids) else None
        except DataError:
            raise
        except Exception as error:
            kind = type(error).__name__
            raise DataError(
                f"{len(work.ids)} samples of the {self.name} data, {work.ids[0]} first, cannot be read: {kind}: {error}"
            ) from error

    def _collated(self, samples: Samples, ids: list[int], epoch: int, draw: int = 0) -> Any:
        with generators_kept():
            read = [self._sample(samples, index, epoch) for index in ids]
            seed_host(self.seed, Purpose.COLLATE, epoch, *ids, *([draw] if draw else []))
            return self.collate(read)

    def _sample(self, samples: Samples, index: int, epoch: int) -> Any:
        seed_host(self.seed, Purpose.SAMPLE, epoch, index)
        try:
            return samples[index]
        except DataError:
            raise
        except Exception as error:
            kind = type(error).__name__
            raise DataError(f"sample {index} of the {self.name} data cannot be read: {kind}: {error}") from error


class StepLoader:
    """Iterates over this rank's StepBatches, from a cursor to the end of the last epoch."""

    def __init__(
        self,
        reader: Reader,
        order: GlobalOrder,
        batching: Batching,
        rank: int,
        device: torch.device,
        options: DataBlock,
        *,
        start: Cursor | None = None,
        epochs: int = 1,
        keep_workers: bool = False,
    ) -> None:
        """`keep_workers`: they stay from one iteration to the next."""
        batched = reader.samples if isinstance(reader.samples, BatchedSamples) else None
        # The loader deals requests to its workers in turn, so that the same piece always goes to the same worker.
        self.pieces = max(1, options.num_workers) if batched and batched.in_regions else 1
        at_once = batched.at_once if batched else 1
        self.requests = _Requests(order, batching, rank, start or Cursor(), epochs, self.pieces, at_once)
        self.reader = reader
        self.device = device
        self.pins = device.type == "cuda" and options.pin_memory is not False
        self.loader = DataLoader(
            _Source(reader),
            batch_size=None,  # what is asked for is already whole micro-batches
            sampler=self.requests,
            num_workers=options.num_workers,
            prefetch_factor=options.prefetch_factor if options.num_workers else None,
            persistent_workers=keep_workers and options.num_workers > 0,
            # A spawned rank would spawn its workers too: they would start slowly, and copy the data set each.
            multiprocessing_context="fork" if options.num_workers and sys.platform == "linux" else None,
            pin_memory=self.pins and self.pieces == 1,
            # DataLoader draws a base seed for its workers from the global generator: give it one that is not ours.
            generator=torch.Generator(),
        )

    def __iter__(self) -> Iterator[StepBatch]:
        steps = self._steps()
        return _moved_ahead(steps, self.device) if self.device.type == "cuda" else steps

    def _steps(self) -> Iterator[StepBatch]:
        require_room_for_workers(self.loader.num_workers)
        loaded = iter(self.loader)
        step = StepBatch()
        while True:
            began = time.perf_counter()
            try:
                pieces = [next(loaded, None) for _ in range(self.pieces)]
            except RuntimeError as error:
                if "DataLoader worker" not in str(error):
                    raise
                raise DataError(
                    f"a loader worker was killed, probably because memory ran out: {str(error).splitlines()[0]} Use fewer "
                    "data.num_workers, a smaller data.prefetch_factor or, where data is streamed, a smaller buffer"
                ) from error
            for piece in pieces:
                if isinstance(piece, DataError):
                    del loaded  # its workers end now, not when somebody lets go of the error and this frame in it
                    raise piece
            whole = [piece for piece in pieces if isinstance(piece, Loaded)]
            if not whole:
                return
            for micro in self.reader.micro_batches(whole, self.requests.asked.popleft()):
                step.micro.append(micro.pin_memory() if self.pins else micro)  # what is pinned already stays as it is
                step.wait += time.perf_counter() - began
                if micro.request.last_of_step:
                    yield step
                    step = StepBatch()
                began = time.perf_counter()


class _Requests:
    """The sampler: what this rank asks for, step by step. Each item goes to one worker."""

    def __init__(
        self, order: GlobalOrder, batching: Batching, rank: int, start: Cursor, epochs: int, pieces: int, at_once: int
    ) -> None:
        self.order, self.batching, self.rank, self.start, self.epochs = order, batching, rank, start, epochs
        self.pieces, self.at_once = pieces, at_once * pieces
        self.asked: deque[list[Request]] = deque()
        """What has been asked for and not arrived yet. Answers arrive in the order of the questions."""

    def __iter__(self) -> Iterator[Work]:
        self.asked.clear()
        group: list[Request] = []
        samples = 0
        for request in self.micro_batches():
            if group and (samples >= self.at_once or request.epoch != group[0].epoch):
                yield from self._cut(group)
                group, samples = [], 0
            group.append(request)
            samples += len(request.ids)
        if group:
            yield from self._cut(group)

    def micro_batches(self) -> Iterator[Request]:
        for batch in self.order.batches(self.start, self.batching.global_batch, self.epochs):
            mine = self.order.shares(batch.indices, self.batching, self.rank)
            for position, part in enumerate(mine):
                # A rank left with nothing runs on a sample of another, weighted 0, to take part in the collectives.
                yield Request(
                    ids=part if len(part) else batch.indices[:1],
                    epoch=batch.epoch,
                    borrowed=not len(part),
                    last_of_step=position == len(mine) - 1,
                    after=batch.after,
                    step_samples=len(batch.indices),
                )

    def _cut(self, group: list[Request]) -> Iterator[Work]:
        """For every worker its piece of each micro-batch of the group."""
        self.asked.append(group)
        pieces = [cut(request.ids, self.pieces) for request in group]
        for number in range(self.pieces):
            mine = [each[number] for each in pieces]
            yield Work(np.concatenate(mine), tuple(map(len, mine)), group[0].epoch)


class _Source(Dataset[Loaded | DataError]):
    def __init__(self, reader: Reader) -> None:
        self.reader = reader

    def __getitem__(self, work: Work) -> Loaded | DataError:
        try:
            loaded = self.reader.read(work)
            return replace(loaded, inputs=hand_over(loaded.inputs)) if get_worker_info() is not None else loaded
        except DataError as error:
            return error  # raised by a worker, its message would be buried in a traceback (torch 2.13)
        except RuntimeError as error:
            if (problem := as_room_problem(error)) is None:
                raise
            return problem


def read_beside(reader: Reader, wanted: Sequence[Repeated], options: DataBlock) -> list[Any]:
    """The inputs of a few micro-batches that the loop does not train on. Read by a worker where the loop has workers: a file that
    this process opened would be shared by all that are forked from it later. A DataError if they cannot be made."""
    workers = min(1, options.num_workers)
    require_room_for_workers(workers)
    loader = DataLoader(
        _Beside(reader, wanted),
        batch_size=None,
        num_workers=workers,
        multiprocessing_context="fork" if workers and sys.platform == "linux" else None,
        generator=torch.Generator(),
    )
    made = list(loader)
    if problem := next((each for each in made if isinstance(each, DataError)), None):
        raise problem
    return [take_over(each.inputs) for each in made]


class _Beside(Dataset[Loaded | DataError]):
    def __init__(self, reader: Reader, wanted: Sequence[Repeated]) -> None:
        self.reader, self.wanted = reader, wanted

    def __len__(self) -> int:
        return len(self.wanted)

    def __getitem__(self, index: int) -> Loaded | DataError:
        try:
            return Loaded((), [], hand_over(self.reader.repeated(self.wanted[index])))
        except DataError as error:
            return error
        except Exception as error:  # whatever a collate() of the user's raises that is given samples twice
            return DataError(f"{type(error).__name__}: {one_line(error)}")


def _moved_ahead(steps: Iterator[StepBatch], device: torch.device) -> Iterator[StepBatch]:
    """The next step's tensors travel to the device on a stream of their own while this step computes."""
    stream = torch.cuda.Stream(device)
    ready: StepBatch | None = None
    for step in steps:
        with torch.cuda.stream(stream):
            moving = replace(step, micro=[micro.to(device) for micro in step.micro])
        if ready is not None:
            yield _arrived(ready, stream, device)
        ready = moving
    if ready is not None:
        yield _arrived(ready, stream, device)


def _arrived(step: StepBatch, stream: torch.cuda.Stream, device: torch.device) -> StepBatch:
    current = torch.cuda.current_stream(device)
    current.wait_stream(stream)
    for micro in step.micro:
        micro.record_stream(current)
    return step


def _map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _map_tensors(item, change) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map_tensors(item, change) for item in value))
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return type(value)(_map_tensors(item, change) for item in value)  # type: ignore[call-arg]
    return value
