"""Files that shardwise makes for itself: synthetic data, transformed volumes. Whole or not there at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path


def cache_folder() -> Path:
    """$SHARDWISE_CACHE, or shardwise/ in the user's cache folder."""
    if chosen := os.environ.get("SHARDWISE_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardwise"


def made_once(path: Path, make: Callable[[Path], object]) -> Path:
    """The file or folder at `path`; if it is not there, `make` writes it under another name and it is moved into place.

    Two processes may both make it; the first to finish wins, and nobody ever reads a half.
    """
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{os.getpid()}-{path.name}")  # the ending stays: some writers go by it
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
