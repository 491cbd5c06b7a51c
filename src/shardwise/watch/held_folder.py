"""A folder that a run writes to for hours: whether it is still the one that the run began in."""

from __future__ import annotations

import os
import weakref
from pathlib import Path

from shardwise.errors import StorageLost


class HeldFolder:
    """It is kept open: so its number is given to no other folder, and where it went can be said."""

    def __init__(self, path: Path, what: str) -> None:
        """`what`: the words for it."""
        self.path, self.what = path, what
        self._place = path.absolute()  # a task may change the working folder
        self._file = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._file)

    def confirm(self) -> None:
        """StorageLost: it is not there any more, or another is in its place. An OSError says nothing of that: storage may be
        back in a minute."""
        if lost := self.lost():
            raise StorageLost(
                f"{lost}. Whatever the run does from here on would be lost: it ends. Bring the folder back to where it was, and "
                "go on from the last checkpoint in it"
            )

    def lost(self) -> str:
        """What became of it, in words; empty: nothing."""
        held = os.fstat(self._file)
        try:
            there = self._place.stat()
        except (FileNotFoundError, NotADirectoryError):
            there = None
        if there is not None and os.path.samestat(held, there):
            return ""
        return f"the {self.what} {self.path} {self._fate(held, there)}"

    def _fate(self, held: os.stat_result, there: os.stat_result | None) -> str:
        anew = "" if there is None else ", and another folder is in its place"
        if not held.st_nlink:
            return f"was deleted while the run was going on{anew}"
        if moved := self._moved_to():
            return f"was moved to {moved} while the run was going on{anew}"
        if there is None:
            return "is gone. Was its storage unmounted?"
        numbers = f"device {_number(there)}, and before {_number(held)}"
        return f"is not the one that the run began in: another is in its place ({numbers}). Was its storage unmounted?"

    def _moved_to(self) -> Path | None:
        """Linux knows where a folder that is open lies now."""
        try:
            own = Path(f"/proc/self/fd/{self._file}")
            now = own.readlink()
            return now if now.samefile(own) else None
        except OSError:
            return None


def _number(about: os.stat_result) -> str:
    return f"{os.major(about.st_dev)}:{os.minor(about.st_dev)}, inode {about.st_ino}"
