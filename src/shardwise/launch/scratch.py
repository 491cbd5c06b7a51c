"""A private folder of this machine for as long as its process lives. What a killed one left behind, the next clears away."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from shardwise.errors import NoRoom

HELD = ".shardwise-scratch"
"""The file that says what a folder is. It is locked while its process lives, in whatever container that is."""
ROOM = 2**20
"""Bytes. Ranks meet there, and leave signs of life, stacks and errors."""


@contextmanager
def scratch_folder(prefix: str = "shardwise-") -> Iterator[Path]:
    with ExitStack() as stack:
        try:
            sweep()
            made = stack.enter_context(tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True))
            _require_room(Path(made))
            stack.enter_context(holding(Path(made)))
        except OSError as error:
            raise no_room_for_temporary_files(error) from None
        yield Path(made)


def no_room_for_temporary_files(error: OSError) -> NoRoom:
    remedy = "Free some there, or name a folder that has room with TMPDIR=…"
    try:
        return NoRoom.of(
            tempfile.gettempdir(), f"for temporary files ({error.strerror}; {ROOM / 2**20:.0f} MiB is needed)", remedy
        )
    except OSError:  # none can be written to
        return NoRoom(f"there is no room for temporary files: {error.strerror}. {remedy}")


def _require_room(folder: Path) -> None:
    file = folder / "room"
    try:
        file.write_bytes(bytes(ROOM))
    finally:
        file.unlink(missing_ok=True)


@contextmanager
def holding(folder: Path) -> Iterator[None]:
    unseen = folder / f"{HELD}-{os.getpid()}"
    file = os.open(unseen, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unseen.rename(folder / HELD)  # whoever sees it finds it locked
        yield
    finally:
        os.close(file)


def sweep() -> None:
    """Remove the scratch folders of this user whose process is gone."""
    for folder in Path(tempfile.gettempdir()).glob("shardwise-*"):
        with contextlib.suppress(OSError):  # it has none of our files, or is just being removed
            about = folder.lstat()
            if stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid() and not _held(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _held(folder: Path) -> bool:
    file = os.open(folder / HELD, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False
