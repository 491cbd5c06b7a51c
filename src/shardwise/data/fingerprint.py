"""What tells the samples of any data set apart, where the task does not say it: their place in one data set that both parts
are taken from; else what some of them hold when they are read.

Reading may be slow, so it has a limit in number and in time. It happens in a process of its own: a data set that keeps a state,
such as a generator or an open file, must be to training as if nobody had read it.
"""

from __future__ import annotations

import dataclasses
import logging
import pickle
import sys
import time
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from shardwise.config.seeds import Purpose
from shardwise.data.loader import BatchedSamples
from shardwise.data.overlap import ANY, NEVER, Contents, SampleContents
from shardwise.data.seeding import generators_kept, seed_host

log = logging.getLogger(__name__)

AT_MOST = 1000
"""Samples of each part that are read."""
SECONDS = 1.0
"""After which no further sample is read."""
_PATIENCE = 10.0
"""Seconds that the process may take for one sample, or to begin."""
_PLAIN = (list, tuple, torch.Tensor, np.ndarray, TensorDataset)
"""Data sets without a state, which can be read anywhere."""
_APART = 2**31
"""In place of the epoch, where the generators are seeded: what is drawn for training must not be drawn for validation again."""


def contents_of_any(train: Any, valid: Any, *, seed: int) -> SampleContents | None:
    """None where nothing can be said."""
    if valid is None:
        return None
    (base, places), (other, held) = _places(train), _places(valid)
    if base is other:
        return SampleContents(_by_place(places), _by_place(held), error_above=ANY)
    numbers: tuple[list[int], list[int]] = ([], [])
    ids: tuple[list[int], list[int]] = ([], [])
    try:
        with generators_kept():
            for part, index, number in _read_some(train, valid, seed):
                ids[part].append(index)
                numbers[part].append(number)
    except Exception as error:  # it will be told when the sample is trained on, with all that belongs to it
        log.debug(f"samples could not be compared: {type(error).__name__}: {error}")
        error.__traceback__ = None  # it would keep the loader, and with it a process
        return None
    looked_at = ""
    if len(ids[0]) < len(train) or len(ids[1]) < len(valid):
        looked_at = (
            f" ({len(ids[0])} of {len(train)} training samples and {len(ids[1])} of {len(valid)} validation samples were "
            "compared)"
        )
    trained, validated = (_by_content(*part) for part in zip(("training", "validation"), ids, numbers, strict=True))
    return SampleContents(trained, validated, error_above=NEVER, looked_at=looked_at)


def _by_content(part: str, ids: list[int], numbers: list[int]) -> Contents:
    return Contents(np.array(numbers, np.uint64), lambda place: f"{part} sample {ids[place]}")


def _places(data: Any) -> tuple[Any, NDArray[np.uint64]]:
    """The data set that lies below all subsets, and the places in it."""
    places = np.arange(len(data), dtype=np.uint64)
    while type(data) is Subset:
        places, data = np.asarray(data.indices, np.int64).astype(np.uint64)[places], data.dataset
    return data, places


def _by_place(places: NDArray[np.uint64]) -> Contents:
    return Contents(places, lambda index: f"sample {places[index]} of the data set")


def _read_some(train: Any, valid: Any, seed: int) -> Iterator[tuple[int, int, int]]:
    """Part, index and number of some samples, of both parts in turn."""
    orders = [_order(len(data)) for data in (train, valid)]
    turns = [
        (part, orders[part][turn])
        for turn in range(max(map(len, orders)))
        for part in (0, 1)
        if turn < len(orders[part])
    ]
    source = _Fingerprints((train, valid), seed)
    deadline = time.monotonic() + SECONDS
    if all(type(data) in _PLAIN for data in (train, valid)):
        found: Any = map(source.__getitem__, turns)
    elif sys.platform == "linux":
        found = DataLoader(
            source,
            batch_size=None,
            sampler=turns,
            num_workers=1,
            timeout=_PATIENCE,
            multiprocessing_context="fork",
            generator=torch.Generator(),
        )
    else:  # a process that is not forked would take seconds to begin
        return
    for each in found:
        yield each
        if time.monotonic() > deadline:
            return


def _order(samples: int) -> list[int]:
    """Which to look at first: both ends, where one part may have been cut off the other, then any."""
    ends = [0, samples - 1][: min(samples, 2)]
    others = np.random.default_rng(samples).permutation(samples)[:AT_MOST].tolist()
    return list(dict.fromkeys([*ends, *others]))[:AT_MOST]


class _Fingerprints(Dataset[tuple[int, int, int]]):
    def __init__(self, parts: tuple[Any, Any], seed: int) -> None:
        self.parts, self.seed = parts, seed

    def __getitem__(self, turn: tuple[int, int]) -> tuple[int, int, int]:
        part, index = turn
        data = self.parts[part]
        seed_host(self.seed, Purpose.SAMPLE, _APART + part, index)
        if isinstance(data, BatchedSamples):
            (sample,) = data.take_apart(data.read(np.array([index]), 0), [1])
        else:
            sample = data[index]
        return part, index, fingerprint(sample)


def fingerprint(sample: Any) -> int:
    """Equal for samples that hold the same, in whatever types of numbers."""
    digest = blake2b(digest_size=8)
    _add(digest, sample)
    return int.from_bytes(digest.digest())


def as_values(array: torch.Tensor | NDArray[Any]) -> NDArray[Any]:
    """In one type for all whole numbers and one for all others: a copy that was read as another type is a copy all the same."""
    if isinstance(array, torch.Tensor):
        host = array.detach().cpu()
        array = (host.float() if host.is_floating_point() else host).contiguous().clone().numpy()
    kind = {"f": np.float32, "b": np.int64, "i": np.int64, "u": np.int64}.get(array.dtype.kind)
    return np.ascontiguousarray(array if kind is None else array.astype(kind))


def _add(digest: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor) or (isinstance(value, np.ndarray) and not value.dtype.hasobject):
        numbers = as_values(value)
        digest.update(f"array {numbers.dtype} {numbers.shape}".encode())
        digest.update(numbers.reshape(-1).view(np.uint8))
    elif isinstance(value, Mapping):
        digest.update(f"mapping {len(value)}".encode())
        for key in sorted(value, key=repr):
            _add(digest, key)
            _add(digest, value[key])
    elif isinstance(value, list | tuple):
        digest.update(f"sequence {len(value)}".encode())
        for each in value:
            _add(digest, each)
    elif isinstance(value, str | bytes | int | float | bool | complex | None):
        digest.update(f"{type(value).__name__} {value!r};".encode(errors="surrogatepass"))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        _add(digest, {each.name: getattr(value, each.name) for each in dataclasses.fields(value)})
    else:
        digest.update(pickle.dumps(value))
