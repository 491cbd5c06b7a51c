"""Every rank's sign of life: what it does, since when, in a small file mapped into its memory.

A beat is a few bytes written into a mapped page, so that it costs about a microsecond and can be read from outside while
the rank hangs. The files lie in a folder of this machine and not in the run folder: that may be on shared storage, which can
be what hangs.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import time
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path


class Phase(IntEnum):
    """What a rank can be doing. The names are those of the log and of verdicts."""

    START = 0
    """From the process's begin until it has its place among the ranks."""
    PREPARE = 1
    RESUME = 2
    DATA = 3
    AGREE = 4
    COMPUTE = 5
    UPDATE = 6
    EVALUATE = 7
    SAVE = 8
    END = 9

    @property
    def words(self) -> str:
        return _WORDS[self]

    @property
    def startup(self) -> bool:
        """Before the first step: it may take as long as data and models take to load."""
        return self <= Phase.RESUME


_WORDS = {
    Phase.START: "start-up",
    Phase.PREPARE: "preparing model and data",
    Phase.RESUME: "loading a checkpoint",
    Phase.DATA: "waiting for data",
    Phase.AGREE: "agreeing on the step",
    Phase.COMPUTE: "computing",
    Phase.UPDATE: "the update",
    Phase.EVALUATE: "evaluation",
    Phase.SAVE: "saving",
    Phase.END: "leaving",
}

_WHO = struct.Struct("<8sIII64s")
_NOW = struct.Struct("<QIqdd")
_NOW_AT = 128
_SIZE = 256
_MARK = b"beat 1\0\0"


@dataclass(frozen=True)
class Beat:
    rank: int
    world: int
    pid: int
    host: str
    counter: int
    phase: Phase
    step: int
    """The step that is being made, from 1; 0 before the first."""
    since: float
    """Of CLOCK_MONOTONIC, which all processes of a machine share; a jump of the wall clock does not touch it."""
    wall: float


class _Own:
    page: mmap.mmap | None = None
    counter = 0
    step = 0


def begin_heartbeats(folder: Path, rank: int, world: int) -> None:
    """From now on this process beats into `folder`. Without it a beat does nothing."""
    content = bytearray(_SIZE)
    _WHO.pack_into(content, 0, _MARK, os.getpid(), rank, world, socket.gethostname().encode()[:63])
    _NOW.pack_into(content, _NOW_AT, 0, Phase.START, 0, time.monotonic(), time.time())
    aside = folder / f".rank-{rank:04d}.beat"
    aside.write_bytes(content)
    with aside.open("r+b") as file:
        _Own.page = mmap.mmap(file.fileno(), _SIZE)
    aside.replace(file_of(folder, rank))  # a reader sees a whole one or none
    _Own.counter = _Own.step = 0


def beat(phase: Phase, step: int | None = None) -> None:
    """This rank is alive and begins with `phase`, of the same step as before if none is given."""
    page = _Own.page
    if page is None:
        return
    _Own.counter += 1
    if step is not None:
        _Own.step = step
    _NOW.pack_into(page, _NOW_AT, _Own.counter, phase, _Own.step, time.monotonic(), time.time())


def end_heartbeats() -> None:
    if _Own.page is not None:
        _Own.page.close()
    _Own.page = None


def file_of(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:04d}.beat"


def read_heartbeats(folder: Path) -> dict[int, Beat]:
    """The last beat of every rank of this machine."""
    found = (_read(file) for file in sorted(folder.glob("rank-*.beat")))
    return {each.rank: each for each in found if each is not None}


def _read(file: Path) -> Beat | None:
    """A rank may write while it is read: two readings that are the same are a whole one."""
    try:
        content = file.read_bytes()
        for _ in range(10):
            again = file.read_bytes()
            if again == content:
                break
            content = again
    except FileNotFoundError:
        return None
    if len(content) < _SIZE or not content.startswith(_MARK):
        return None
    _, pid, rank, world, host = _WHO.unpack_from(content, 0)
    counter, phase, step, since, wall = _NOW.unpack_from(content, _NOW_AT)
    try:
        known = Phase(phase)
    except ValueError:
        return None
    return Beat(rank, world, pid, host.rstrip(b"\0").decode(errors="replace"), counter, known, step, since, wall)
