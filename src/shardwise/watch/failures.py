"""What a rank writes down when it fails, as JSON, for whoever started it."""

from __future__ import annotations

import json
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from shardwise.errors import ShardwiseError

_PEER_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Socket Timeout",
    "remote process",
    "connectFullMesh failed",
    "failed to recv, got 0 bytes",
    "NCCL communicator was aborted",
)

RESERVED = 2**16
"""Bytes."""


@dataclass(frozen=True)
class RankError:
    """What a rank wrote down when it failed."""

    rank: int
    when: float
    message: str
    trace: str
    for_user: bool
    """The message is enough; no traceback is needed."""
    peer_lost: bool
    """It failed because another rank went away."""


def reserve_room(folder: Path, rank: int) -> None:
    """For what may have to be written down when nothing else fits in there."""
    _room(folder, rank).write_bytes(bytes(RESERVED))


def _room(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:04d}.room"


def record_failure(error: BaseException, folder: Path, rank: int) -> None:
    record = {
        "rank": rank,
        "when": time.time(),
        "message": str(error) if isinstance(error, ShardwiseError) else f"{type(error).__name__}: {error}",
        "trace": "".join(traceback.format_exception(error)),
        "for_user": isinstance(error, ShardwiseError),
        "peer_lost": peer_lost(error),
    }
    _room(folder, rank).unlink(missing_ok=True)
    aside = folder / f".error-{rank}"
    aside.write_text(json.dumps(record))
    aside.rename(folder / f"error-{rank}.json")


def read_failures(folder: Path) -> dict[int, RankError]:
    errors = [RankError(**json.loads(file.read_text())) for file in folder.glob("error-*.json")]
    return {error.rank: error for error in errors}


def peer_lost(error: BaseException) -> bool:
    """Whether an error only says that another rank is gone."""
    return isinstance(error, RuntimeError | ConnectionError) and any(mark in str(error) for mark in _PEER_LOST)
