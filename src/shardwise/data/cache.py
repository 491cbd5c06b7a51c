"""Files that shardwise makes for itself: synthetic data, transformed volumes. Whole or not there at all."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from uuid import uuid4

from shardwise import __version__


def cache_folder() -> Path:
    """$SHARDWISE_CACHE, or shardwise/ in the user's cache folder."""
    if chosen := os.environ.get("SHARDWISE_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardwise"


def cache_name(*parts: object) -> str:
    """The name of what follows from these parts and this version of shardwise alone."""
    return hashlib.sha256(json.dumps([__version__, *parts], sort_keys=True).encode()).hexdigest()[:24]


def file_stamp(*files: Path) -> list[list[str | int]]:
    """What changes when a file does. Copying tools set the time of a change at will, the time of the entry nobody does."""
    stats = [(file.resolve(), file.stat()) for file in files]
    return [[str(file), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns] for file, stat in stats]


@cache
def code_stamp(*files: str) -> str:
    """What changes when these modules (their `__file__`) do, so that nobody has to remember to raise a number. Where a
    package is installed without its sources, the version has to tell it alone."""
    try:
        return hashlib.sha256(b"\0".join(Path(file).read_bytes() for file in files)).hexdigest()
    except OSError:
        return ""


def made_once(path: Path, make: Callable[[Path], object]) -> Path:
    """The file or folder at `path`; if it is not there, `make` writes it under another name and it is moved into place.

    Two processes may both make it; the first to finish wins, and nobody ever reads a half.
    """
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    # Machines may share the folder, and have processes of the same number. The ending stays: some writers go by it.
    aside = path.with_name(f".{os.getpid()}-{uuid4().hex[:8]}-{path.name}")
    try:
        make(aside)
        try:
            aside.rename(path)
        except OSError:  # a folder that somebody else has put there meanwhile
            if not path.exists():
                raise
    finally:
        if aside.is_dir():
            shutil.rmtree(aside, ignore_errors=True)
        else:
            aside.unlink(missing_ok=True)
    return path
