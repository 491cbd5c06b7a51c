"""What a sharded copy was made from and by, and whether that has changed since: size, modification time, a look at the content.

The look is a checksum of the whole of a small file, and of blocks spread evenly over a large one: quick enough for every start.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.config.commands import command
from shardwise.errors import DataError

FORMAT = 2
"""Of the folder, counted up with every change after which an older copy would be read otherwise than it was meant. 1 did not
say what it was made from, and its cells had not been looked at."""
BLOCK, MOST_BLOCKS = 64 * 2**10, 512
"""32 MiB are looked at, at most."""


@dataclass(frozen=True)
class Source:
    path: str
    size: int
    modified: int
    """In nanoseconds; of a folder, the latest of its files."""
    content: str

    @classmethod
    def of(cls, path: Path) -> Source:
        """A file, or a zarr store."""
        try:
            files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
            about = [file.stat() for file in files]
            sizes = [each.st_size for each in about]
            names = [str(file.relative_to(path)) for file in files]
            seen = hashlib.sha256(repr(list(zip(names, sizes, strict=True))).encode())
            for block in _blocks(files, sizes):
                seen.update(block)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
        modified = max((each.st_mtime_ns for each in about), default=0)
        return cls(str(path.absolute()), sum(sizes), modified, seen.hexdigest())


def check_format(folder: Path, about: dict[str, Any]) -> None:
    made = about.get("format", 1)
    if made != FORMAT:
        raise DataError(
            f"{folder} was made by {'an older' if made < FORMAT else 'a newer'} version of shardwise "
            f"({about.get('shardwise', 'which did not say which')}): its format is {made}, and this one reads {FORMAT}. Make it "
            f"anew:  {to_make_a_copy()}"
        )


def to_make_a_copy() -> str:
    """From the h5ad files that a config names."""
    return command("data", "shard", "CONFIG", "--to", "FOLDER")


def sources_of(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """For a manifest."""
    return [asdict(Source.of(path)) for path in paths]


@dataclass(frozen=True)
class Comparison:
    changed: list[str]
    """A sentence for each that is another one now."""
    touched: list[str]
    """Those that look the same and have another modification time."""
    gone: list[str]


def compare(recorded: Sequence[dict[str, Any]]) -> Comparison:
    found = Comparison([], [], [])
    for entry in recorded:
        then, path = Source(**entry), Path(entry["path"])
        if not path.exists():
            found.gone.append(then.path)
            continue
        now = Source.of(path)
        if now.size != then.size:
            found.changed.append(f"{path} has {now.size} bytes, and had {then.size}")
        elif now.content != then.content:
            found.changed.append(f"{path} has another content of the same size")
        elif now.modified != then.modified:
            found.touched.append(then.path)
    return found


def _blocks(files: Sequence[Path], sizes: Sequence[int]) -> Iterable[bytes]:
    """All of it, or blocks at equal distances, the first and the last among them; files lie end to end."""
    number = np.array([-(-size // BLOCK) for size in sizes], np.int64)
    ends = np.cumsum(number)
    total = int(ends[-1]) if len(ends) else 0
    chosen = np.arange(total) if total <= MOST_BLOCKS else np.linspace(0, total - 1, MOST_BLOCKS).astype(np.int64)
    which = np.searchsorted(ends, chosen, side="right")
    for file in np.unique(which).tolist():
        with files[file].open("rb") as stream:
            for block in (chosen[which == file] - (ends[file] - number[file])).tolist():
                stream.seek(block * BLOCK)
                yield stream.read(BLOCK)
