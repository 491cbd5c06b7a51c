"""From the global order to micro-batches on the device: workers, pinned memory, the next step moved ahead.

A worker gets a whole micro-batch to make, so that the number of workers cannot change what is in it. What is random
in a sample (augmentation, masking) is seeded by (seed, epoch, sample): it does not depend on who reads it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

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


@dataclass(frozen=True)
class Request:
    """What a rank asks for: one micro-batch. `borrowed`: it has no sample of its own and counts nothing."""

    ids: tuple[int, ...]
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

    samples: Samples
    collate: Callable[[list[Any]], Any]
    count: Callable[[Any], int]
    seed: int
    name: str = "training"

    def read(self, request: Request) -> MicroBatch:
        samples = [self._sample(index, request.epoch) for index in request.ids]
        with seeded(self.seed, Purpose.COLLATE, request.epoch, *request.ids):
            inputs = self.collate(samples)
        return MicroBatch(inputs, 0 if request.borrowed else int(self.count(inputs)), request)

    def _sample(self, index: int, epoch: int) -> Any:
        with seeded(self.seed, Purpose.SAMPLE, epoch, index):
            try:
                return self.samples[index]
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
        self.requests = _Requests(order, batching, rank, start or Cursor(), epochs)
        self.device = device
        on_cuda = device.type == "cuda"
        self.loader = DataLoader(
            _Source(reader),
            batch_size=None,  # a request is already a whole micro-batch
            sampler=self.requests,
            num_workers=options.num_workers,
            prefetch_factor=options.prefetch_factor if options.num_workers else None,
            # A spawned rank would spawn its workers too: they would start slowly, and copy the data set each.
            multiprocessing_context="fork" if options.num_workers and sys.platform == "linux" else None,
            pin_memory=on_cuda if options.pin_memory is None else options.pin_memory and on_cuda,
            # DataLoader draws a base seed for its workers from the global generator: give it one that is not ours.
            generator=torch.Generator(),
        )

    def __iter__(self) -> Iterator[StepBatch]:
        steps = self._steps()
        return _moved_ahead(steps, self.device) if self.device.type == "cuda" else steps

    def _steps(self) -> Iterator[StepBatch]:
        micro_batches = iter(self.loader)
        step = StepBatch()
        while True:
            began = time.perf_counter()
            micro = next(micro_batches, None)
            step.wait += time.perf_counter() - began
            if micro is None:
                return
            if isinstance(micro, DataError):
                del micro_batches  # its workers end now, not when somebody lets go of the error and this frame in it
                raise micro
            step.micro.append(micro)
            if micro.request.last_of_step:
                yield step
                step = StepBatch()


class _Requests:
    """The sampler: what this rank asks for, step by step."""

    def __init__(self, order: GlobalOrder, batching: Batching, rank: int, start: Cursor, epochs: int) -> None:
        self.order, self.batching, self.rank, self.start, self.epochs = order, batching, rank, start, epochs

    def __iter__(self) -> Iterator[Request]:
        for batch in self.order.batches(self.start, self.batching.global_batch, self.epochs):
            mine = shares(batch.indices, self.batching, self.rank)
            for position, part in enumerate(mine):
                # A rank left with nothing runs on a sample of another, weighted 0, to take part in the collectives.
                ids = part if len(part) else batch.indices[:1]
                yield Request(
                    ids=tuple(int(index) for index in ids),
                    epoch=batch.epoch,
                    borrowed=not len(part),
                    last_of_step=position == len(mine) - 1,
                    after=batch.after,
                    step_samples=len(batch.indices),
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
