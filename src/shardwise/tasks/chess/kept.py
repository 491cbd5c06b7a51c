"""The games of a file or data set, once they have been checked: kept in the cache, one after the other, and read from there.

So a file is checked once, not at every start, and the ranks of a machine share what they read.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import time
import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import chess
import numpy as np
from numpy.typing import NDArray

from shardwise.data.cache import cache_folder, made_once
from shardwise.errors import DataError
from shardwise.tasks.chess.examine import Found, Text, Wish, examine_all

log = logging.getLogger(__name__)

VERSION = 2
"""Raised when games are read, checked or kept in another way: what an older version has kept is not used then."""
SHOWN = 5
PROGRESS_SECONDS = 10.0


class Source(Protocol):
    name: str
    """For messages: the file, or the data set."""
    unit: str
    """What its numbers count: line or row."""
    is_pgn: bool
    """Known once the first text is there."""

    def stamp(self) -> list[Any]:
        """What changes when the content does."""
        ...

    def texts(self) -> Iterator[Text]: ...
    def share_read(self) -> float: ...


@dataclass
class Facts:
    """What there was beside games that can be trained on. Whether that is an error, the config says."""

    texts: int = 0
    empty: int = 0
    illegal: int = 0
    joined: int = 0
    """Texts with more than one game. Those games are kept, as the config may ask for."""
    other_starts: int = 0
    """Games that start from another position than the usual."""
    first_empty: list[str] = field(default_factory=list)
    first_illegal: list[str] = field(default_factory=list)
    first_joined: list[str] = field(default_factory=list)
    """The first few, with the place of each."""

    def note(self, found: Found, place: str) -> None:
        self.texts += 1
        self.other_starts += sum(not good.usual_start for good in found.games)
        if found.empty:
            self.empty += 1
            self.first_empty = [*self.first_empty, place][:SHOWN]
        if found.problem:
            self.illegal += 1
            self.first_illegal = [*self.first_illegal, f"{place}: {found.problem}"][:SHOWN]
        if found.joined:
            self.joined += 1
            self.first_joined = [*self.first_joined, f"{place}: {found.joined}"][:SHOWN]

    def add(self, other: Facts) -> None:
        """`other` comes after."""
        for name, value in asdict(other).items():
            both = getattr(self, name) + value
            setattr(self, name, both[:SHOWN] if isinstance(both, list) else both)


class KeptGames(Sequence[str]):
    def __init__(self, folder: Path, *, whole: bool = False) -> None:
        """`whole`: compare the contents with their checksums. ValueError, KeyError or OSError: it is damaged."""
        self.folder = folder
        about = json.loads((folder / "about.json").read_text())
        self.facts = Facts(**about["facts"])
        self.bounds: NDArray[np.int64] = np.load(folder / "bounds.npy", mmap_mode="r")
        self.digests: NDArray[np.uint64] = np.load(folder / "digests.npy", mmap_mode="r")
        size = (folder / "games.txt").stat().st_size
        if size != int(self.bounds[-1]) or len(self.digests) != len(self) or size != about["size"]:
            raise ValueError("sizes do not match")
        # A file without bytes cannot be mapped.
        self.bytes: NDArray[np.uint8] = (
            np.memmap(folder / "games.txt", np.uint8, mode="r") if size else np.empty(0, np.uint8)
        )
        if whole and [_checksum(each) for each in (self.bytes, self.bounds, self.digests)] != about["checksums"]:
            raise ValueError("checksums do not match")

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.bytes[self.bounds[index] : self.bounds[index + 1]].tobytes().decode()

    def __reduce__(self) -> tuple[type[KeptGames], tuple[Path]]:
        return KeptGames, (self.folder,)  # and not the games themselves


def keep_games(source: Source, *, uci: bool, whole: bool) -> KeptGames:
    """The games of a source, as an earlier start has kept them, or checked now. `whole`: look whether they still are."""
    key = json.dumps([VERSION, chess.__version__, uci, source.stamp()])
    folder = cache_folder() / "chess" / hashlib.sha256(key.encode()).hexdigest()[:24]
    try:
        for attempt in (1, 2):
            made_once(folder, lambda aside: _keep(source, aside, uci=uci))
            try:
                return KeptGames(folder, whole=whole)
            except (ValueError, KeyError, TypeError, FileNotFoundError, EOFError):
                if attempt == 2:
                    raise
                log.info(f"the checked copy of {source.name} in the cache is damaged: the games are checked again")
                shutil.rmtree(folder)
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(
            f"the checked games of {source.name} cannot be kept in {folder.parent}: {reason}. The environment variable "
            "SHARDWISE_CACHE names another folder"
        ) from error
    raise AssertionError("unreachable")


def _keep(source: Source, folder: Path, *, uci: bool) -> None:
    folder.mkdir()
    stamp, facts = source.stamp(), Facts()
    bounds, digests = array("q", [0]), array("Q")
    with (folder / "games.txt").open("wb") as games:
        for text, found in _with_progress(source, uci):
            facts.note(found, _place(source, text, found))
            for good in found.games:
                bounds.append(bounds[-1] + games.write(good.text.encode()))
                digests.append(good.digest)
    if source.stamp() != stamp:
        raise DataError(f"{source.name} has changed while its games were checked: start again when it is finished")
    arrays = np.array(bounds, np.int64), np.array(digests, np.uint64)
    for name, content in zip(("bounds", "digests"), arrays, strict=True):
        np.save(folder / f"{name}.npy", content)
    written = np.memmap(folder / "games.txt", np.uint8, mode="r") if bounds[-1] else np.empty(0, np.uint8)
    about = {
        "source": source.name,
        "facts": asdict(facts),
        "size": bounds[-1],
        "checksums": [_checksum(each) for each in (written, *arrays)],
    }
    (folder / "about.json").write_text(json.dumps(about, indent=1))


def _with_progress(source: Source, uci: bool) -> Iterator[tuple[Text, Found]]:
    texts = source.texts()
    first = next(texts, None)
    if first is None:
        return
    began = said = time.monotonic()
    examined = examine_all(_chain(first, texts), Wish(uci, source.is_pgn))
    try:
        told = False
        for count, (text, found) in enumerate(examined, start=1):
            yield text, found
            now = time.monotonic()
            if found.problem and not told and now - began > PROGRESS_SECONDS:
                told = True
                log.info(f"{_place(source, text, found)}: {found.problem}. The check goes on, to count such games")
            if now - said >= PROGRESS_SECONDS:
                said, share = now, source.share_read()
                left = f", about {(now - began) / share * (1 - share):.0f} s left" if share > 0.01 else ""
                log.info(f"checking the games of {source.name}: {count:,} are read{left}")
    finally:
        examined.close()  # type: ignore[attr-defined]


def _chain(first: Text, others: Iterator[Text]) -> Iterator[Text]:
    yield first
    yield from others


def _place(source: Source, text: Text, found: Found) -> str:
    # The lines within a text of JSON are not lines of the file.
    return f"{source.name}, {source.unit} {text.line + (found.line if source.is_pgn else 0)}"


def _checksum(content: NDArray[Any]) -> int:
    return zlib.crc32(np.ascontiguousarray(content).view(np.uint8).data)
