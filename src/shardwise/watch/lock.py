"""One folder, one run: a lock that ends with the process that holds it, however it ends."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from pathlib import Path

from shardwise.errors import LaunchError

LOCK = ".lock"


def lock_folder(folder: Path) -> int | None:
    """Hold a run folder, or say who does. None: the storage has no locks.

    A lock of `lockf` belongs to the process alone. One of `flock` would be shared with the loader workers that it forks,
    which outlive a killed rank by seconds, and would be in the way of its restart.
    """
    try:
        file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise LaunchError(f"the run folder {folder} cannot be written to: {error.strerror}") from None
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = _holder(file)
        os.close(file)
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise LaunchError(
                f"{folder} is in use by a run that is going on ({holder}). Wait for it, stop it, or give this run a folder of "
                "its own with --set run_dir=…"
            ) from None
        return None
    about = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S %z")}
    os.ftruncate(file, 0)
    os.pwrite(file, json.dumps(about).encode(), 0)
    return file


def unlock(file: int | None) -> None:
    if file is not None:
        os.close(file)


def _holder(file: int) -> str:
    try:
        about = json.loads(os.pread(file, 4096, 0))
        return f"process {about['pid']} on {about['host']}, since {about['since']}"
    except (ValueError, KeyError, TypeError, OSError):
        return "it has not said who it is"
