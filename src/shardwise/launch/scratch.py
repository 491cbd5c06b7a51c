"""A private folder of this machine for as long as its process lives. What a killed one left behind, the next clears away."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HELD = ".shardwise-scratch"
"""The file that says what a folder is. It is locked while its process lives, in whatever container that is."""


@contextmanager
def scratch_folder(prefix: str = "shardwise-") -> Iterator[Path]:
    sweep()
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as made:
        folder = Path(made)
        with holding(folder):
            yield folder


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
