"""How a loader's worker hands a batch to its rank: in shared memory, or through a pipe where that has no room.

PyTorch copies tensors to shared memory in a thread of the worker, where an error is printed, the batch is lost, and the rank
waits for it for ever (torch 2.13). So they are put there before.
"""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor
from torch.utils.data import get_worker_info

from shardwise.data.tensor_bundle import TensorBundle, bundle, unbundle
from shardwise.errors import MORE_SHARED_MEMORY, SHARED_MEMORY, DataError, NoRoom, one_line, room_in

log = logging.getLogger(__name__)

WITHOUT_WORKERS = "read without workers: data.num_workers: 0"
KEPT_FREE = 2**20
"""Bytes of shared memory."""
FEWER = "lower data.num_workers or data.prefetch_factor"


@dataclass(frozen=True)
class ByPipe:
    """A batch as bytes."""

    content: bytes
    why: str


def hand_over(batch: Any) -> Any:
    """As one tensor, if it is a dict of them. In a worker, in shared memory."""
    packed = bundle(batch)
    if get_worker_info() is None:
        return packed
    tensors = list(_tensors_in(packed))
    if not _takes(sum(tensor.nbytes for tensor in tensors)):
        return ByPipe(pickle.dumps(packed), os.strerror(errno.ENOSPC))
    try:
        for tensor in tensors:
            tensor.share_memory_()
    except (RuntimeError, OSError) as error:
        if "shared memory" in str(error):  # no room after all, or too many of them open
            return ByPipe(pickle.dumps(packed), one_line(error).rpartition(": ")[2])
    return packed


def _takes(size: int) -> bool:
    """Whether there is room for so many bytes, and a little is left over: workers that start later are spoken to by it."""
    try:
        about = os.statvfs(SHARED_MEMORY)
    except OSError:  # this machine has it elsewhere
        return True
    kept = min(KEPT_FREE, about.f_blocks * about.f_frsize // 4)
    return size + kept <= about.f_bavail * about.f_frsize


def take_over(handed: Any) -> Any:
    """What `hand_over` was given."""
    if isinstance(handed, ByPipe):
        _say_that_it_is_slow(handed.why)
        handed = pickle.loads(handed.content)
    return unbundle(handed)


def as_room_problem(error: RuntimeError) -> DataError | None:
    """What a worker met while it made a batch, if that is it: PyTorch's own collate writes to shared memory at once."""
    if "shared memory" not in str(error):
        return None
    return DataError(str(NoRoom.in_shared_memory("for what a loader worker has read", FEWER, WITHOUT_WORKERS)))


def require_room_for_workers(count: int) -> None:
    """NoRoom, where not even what they are spoken to by can be made: PyTorch would fail half-way."""
    if not count:
        return
    try:
        several = [multiprocessing.get_context("fork").Semaphore() for _ in range(8 + 4 * count)]
        several.clear()
    except OSError:
        raise NoRoom.in_shared_memory(f"for {count} loader worker(s)", WITHOUT_WORKERS) from None


def _tensors_in(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, TensorBundle):
        yield batch.buffer
    elif isinstance(batch, Mapping | Sequence) and not isinstance(batch, str | bytes):
        for each in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _tensors_in(each)


@cache
def _say_that_it_is_slow(why: str) -> None:
    """Once in a process."""
    log.warning(
        f"batches of loader workers come through a pipe, which is slower, because shared memory cannot take them: {why}; "
        f"{room_in(SHARED_MEMORY)}. {MORE_SHARED_MEMORY}, or {FEWER}"
    )
