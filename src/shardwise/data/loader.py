"""From the global order to micro-batches on the device: workers, pinned memory, the next step moved ahead.

A worker gets a whole micro-batch to make, so that the number of workers cannot change what is in it. What is random
in a sample (augmentation, masking) is seeded by (seed, epoch, sample): it does not depend on who reads it.
"""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from shardwise.config import Batching, DataBlock
from shardwise.config.seeds import Purpose
from shardwise.data.order import Cursor, GlobalOrder, shares
from shardwise.data.seeding import seeded
from shardwise.errors import DataError


class Samples(Protocol):
    """A data set: it has a length, and sample i is always the same sample."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


class BatchedSamples(ABC):
    """A data set that makes whole micro-batches itself, where one sample at a time would be slow."""

    in_regions: bool = False
    """A global batch is sorted by place in the file, and every worker reads its own part of each micro-batch: so no
    two ranks or workers read the same region."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, ids: Sequence[int], epoch: int) -> Any:
        """The batch of these samples. What is random in a sample must follow from (seed, epoch, sample)."""

    @abstractmethod
    def join(self, parts: list[Any]) -> Any:
        """Several such batches as one."""

    def order(self, seed: int) -> GlobalOrder:
        return GlobalOrder(len(self), seed)


@dataclass(frozen=True)
class Request:
    """What a rank asks for: one micro-batch. `borrowed`: it has no sample of its own and counts nothing."""

    ids: tuple[int, ...]
    epoch: int
    borrowed: bool
    last_of_step: bool
    after: Cursor
    step_samples: int
    pieces: int = 1
    """Into how many requests the micro-batch was divided; this is one of them."""


@dataclass
class MicroBatch:
    inputs: Any
    count: int
    """What the loss will be divided by: samples, tokens or voxels of this micro-batch. 0 when borrowed."""
    request: Request

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
        return [index for micro in self.micro if not micro.request.borrowed for index in micro.request.ids]

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


@dataclass
class Reader:
    """How a data set becomes micro-batches: which samples, put together how, counted how."""

    samples: Samples | BatchedSamples
    collate: Callable[[list[Any]], Any]
    count: Callable[[Any], int]
    seed: int
    name: str = "training"

    def read(self, request: Request) -> MicroBatch:
        if not request.ids:  # a worker's piece of a micro-batch that is smaller than the number of workers
            return MicroBatch(None, 0, request)
        if isinstance(self.samples, BatchedSamples):
            inputs = self._batch(self.samples, request)
        else:
            samples = [self._sample(self.samples, index, request.epoch) for index in request.ids]
            with seeded(self.seed, Purpose.COLLATE, request.epoch, *request.ids):
                inputs = self.collate(samples)
        return MicroBatch(inputs, 0 if request.borrowed else int(self.count(inputs)), request)

    def join(self, pieces: list[MicroBatch]) -> MicroBatch:
        """One micro-batch from what the workers made of its pieces."""
        if len(pieces) == 1:
            return pieces[0]
        assert isinstance(self.samples, BatchedSamples)
        filled = [piece for piece in pieces if piece.request.ids]
        ids = tuple(index for piece in filled for index in piece.request.ids)
        request = replace(pieces[-1].request, ids=ids, pieces=1)
        inputs = self.samples.join([piece.inputs for piece in filled])
        return MicroBatch(inputs, sum(piece.count for piece in filled), request)

    def _batch(self, samples: BatchedSamples, request: Request) -> Any:
        try:
            return samples.read(request.ids, request.epoch)
        except DataError:
            raise
        except Exception as error:
            kind, first = type(error).__name__, request.ids[0]
            raise DataError(
                f"{len(request.ids)} samples of the {self.name} data, {first} first, cannot be read: {kind}: {error}"
            ) from error

    def _sample(self, samples: Samples, index: int, epoch: int) -> Any:
        with seeded(self.seed, Purpose.SAMPLE, epoch, index):
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
    ) -> None:
        in_regions = isinstance(reader.samples, BatchedSamples) and reader.samples.in_regions
        # The loader deals requests to its workers in turn, so that the same piece always goes to the same worker.
        pieces = max(1, options.num_workers) if in_regions else 1
        self.requests = _Requests(order, batching, rank, start or Cursor(), epochs, pieces)
        self.reader = reader
        self.device = device
        self.pins = device.type == "cuda" and options.pin_memory is not False
        self.loader = DataLoader(
            _Source(reader),
            batch_size=None,  # a request is already a whole micro-batch
            sampler=self.requests,
            num_workers=options.num_workers,
            prefetch_factor=options.prefetch_factor if options.num_workers else None,
            # A spawned rank would spawn its workers too: they would start slowly, and copy the data set each.
            multiprocessing_context="fork" if options.num_workers and sys.platform == "linux" else None,
            pin_memory=self.pins and pieces == 1,
            # DataLoader draws a base seed for its workers from the global generator: give it one that is not ours.
            generator=torch.Generator(),
        )

    def __iter__(self) -> Iterator[StepBatch]:
        steps = self._steps()
        return _moved_ahead(steps, self.device) if self.device.type == "cuda" else steps

    def _steps(self) -> Iterator[StepBatch]:
        loaded = iter(self.loader)
        step = StepBatch()
        pieces: list[MicroBatch] = []
        while True:
            began = time.perf_counter()
            piece = next(loaded, None)
            if isinstance(piece, DataError):
                del loaded  # its workers end now, not when somebody lets go of the error and this frame in it
                raise piece
            if piece is None:
                return
            pieces.append(piece)
            whole = len(pieces) == piece.request.pieces
            if whole:
                step.micro.append(self._joined(pieces))
                pieces = []
            step.wait += time.perf_counter() - began
            if whole and piece.request.last_of_step:
                yield step
                step = StepBatch()

    def _joined(self, pieces: list[MicroBatch]) -> MicroBatch:
        micro = self.reader.join(pieces)
        return micro.pin_memory() if self.pins and len(pieces) > 1 else micro


class _Requests:
    """The sampler: what this rank asks for, step by step."""

    def __init__(
        self, order: GlobalOrder, batching: Batching, rank: int, start: Cursor, epochs: int, pieces: int
    ) -> None:
        self.order, self.batching, self.rank, self.start, self.epochs = order, batching, rank, start, epochs
        self.pieces = pieces

    def __iter__(self) -> Iterator[Request]:
        for batch in self.order.batches(self.start, self.batching.global_batch, self.epochs):
            mine = shares(batch.indices, self.batching, self.rank)
            for position, part in enumerate(mine):
                # A rank left with nothing runs on a sample of another, weighted 0, to take part in the collectives.
                for ids in np.array_split(part if len(part) else batch.indices[:1], self.pieces):
                    yield Request(
                        ids=tuple(ids.tolist()),
                        epoch=batch.epoch,
                        borrowed=not len(part),
                        last_of_step=position == len(mine) - 1,
                        after=batch.after,
                        step_samples=len(batch.indices),
                        pieces=self.pieces,
                    )


class _Source(Dataset[MicroBatch | DataError]):
    def __init__(self, reader: Reader) -> None:
        self.reader = reader

    def __getitem__(self, request: Request) -> MicroBatch | DataError:
        try:
            return self.reader.read(request)
        except DataError as error:
            return error  # raised by a worker, its message would be buried in a traceback (torch 2.13)


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
