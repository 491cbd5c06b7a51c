"""The key of a run: whoever has it belongs to it. It lies in the run folder, which all machines of a run see and only their user
can read, or comes by an environment variable."""

from __future__ import annotations

import logging
import os
import secrets
import stat
import time
from pathlib import Path

from shardwise.errors import LaunchError

log = logging.getLogger(__name__)

NAME = ".key"
GIVEN = "SHARDWISE_KEY"
"""The key itself. Ranks of one machine get it so from their launcher."""
GIVEN_FILE = "SHARDWISE_KEY_FILE"
LEAST = 16
"""Characters of a key that somebody gives."""


def run_key(run_folder: Path) -> bytes:
    """As it was given, or as it lies in the run folder, where the first one to come makes it."""
    if given := os.environ.get(GIVEN):
        return _long_enough(given, GIVEN)
    if file := os.environ.get(GIVEN_FILE):
        return _long_enough(_read(Path(file).expanduser()), f"{GIVEN_FILE}={file}")
    file_of_run = run_folder / NAME
    if not file_of_run.exists():
        _make(file_of_run)
    return _long_enough(_read(file_of_run, patience=10.0), str(file_of_run))


def new_key() -> str:
    return secrets.token_hex(32)


def _make(file: Path) -> None:
    """Of all who try at the same moment, one does."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        return
    except OSError as error:
        raise LaunchError(
            f"the key by which the ranks of a run know each other cannot be made in {file.parent}: {error.strerror}. Give all "
            f"of them the same one in the environment variable {GIVEN} or {GIVEN_FILE}"
        ) from None
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(new_key().encode())
        stream.flush()
        os.fsync(stream.fileno())


def _read(file: Path, patience: float = 0.0) -> str:
    """`patience`: seconds that it may still be empty, because another one is just making it."""
    give_up = time.monotonic() + patience
    try:
        while True:
            descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                about = os.fstat(descriptor)
                if not stat.S_ISREG(about.st_mode):
                    raise LaunchError(f"the key {file} is no file")
                content = os.read(descriptor, 4096).decode().strip()
            finally:
                os.close(descriptor)
            if content or time.monotonic() > give_up:
                break
            time.sleep(0.05)
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"the key {file} cannot be read: {getattr(error, 'strerror', error)}") from None
    if about.st_mode & 0o077:
        log.warning(f"the key {file} can be read by others, who could then join the run: chmod 600 {file}")
    return content


def _long_enough(key: str, where: str) -> bytes:
    if len(key) < LEAST:
        raise LaunchError(f"the key of {where} has {len(key)} characters: it needs {LEAST} at the least")
    return key.encode()
