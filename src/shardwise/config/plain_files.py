"""Files that may come from anywhere, and the JSON in them: regular files alone, of bounded size, each key once."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import stat
from pathlib import Path
from typing import Any, TypeGuard

_KINDS = {
    stat.S_IFLNK: "a link", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
}  # fmt: skip
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
_LONE_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
MOST_LEVELS = 24
"""Of lists and blocks in each other."""
MOST_BLOCKS = 200_000
"""In all: those of a hundred thousand files, and as many more."""


class NotPlain(ValueError):
    """What lies there is no regular file."""


def plain_size(file: Path) -> int:
    """The size of a regular file, which is not opened."""
    return _plain(file, file.lstat()).st_size


def open_plain(file: Path, *, follow: bool = False) -> io.FileIO:
    """A regular file, for reading. Pipes are not waited for, devices not touched, and links only followed with `follow`: for a
    name that the user has given. What was opened is looked at again: the name may stand for something else by then."""
    _plain(file, file.stat() if follow else file.lstat())
    try:
        descriptor = os.open(file, _FLAGS if follow else _FLAGS | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise NotPlain(f"{file.name} is a link or a device, and not a file") from None
        raise
    try:
        _plain(file, os.fstat(descriptor))
        return io.FileIO(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _plain(file: Path, about: os.stat_result) -> os.stat_result:
    if not stat.S_ISREG(about.st_mode):
        kind = _KINDS.get(stat.S_IFMT(about.st_mode), "something else")
        raise NotPlain(f"{file.name} is {kind}, and not a file")
    return about


def read_plain(file: Path, most: int) -> bytes:
    """All of a regular file that has so many bytes at most."""
    with open_plain(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > most:
            raise ValueError(f"{file.name} has {size} bytes, and {most} is the most that is read")
        return read_exactly(stream, size)


def read_exactly(stream: io.FileIO, size: int) -> bytes:
    """So many bytes, or ValueError. A single read returns 2 GiB at most."""
    pieces, left = list[bytes](), size
    while left:
        piece = stream.read(left)
        if not piece:
            raise ValueError(f"{left} of {size} bytes are missing")
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)


def parse_json(data: bytes, levels: int | None = None) -> Any:
    """ValueError says what is wrong with it. `levels`: how many lists and blocks may lie in each other; where none are given,
    whoever asks looks at each of them anyway, and has files that are as large."""
    if levels is not None and data.count(b"{") + data.count(b"[") > MOST_BLOCKS:
        raise ValueError(f"it has more than {MOST_BLOCKS} lists and blocks")
    try:
        text = data.decode()
        content = json.loads(text, object_pairs_hook=_each_key_once)
        if _LONE_SURROGATE.search(text):
            json.dumps(content, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("its lists and blocks are nested too deeply") from None
    except UnicodeError:
        raise ValueError("it is not text in UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error}") from None
    if levels is not None and _is_deeper(content, levels):
        raise ValueError("its lists and blocks are nested too deeply")
    return content


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        seen = set[str]()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice!r:.80} is given twice")
    return content


def _is_deeper(content: Any, levels: int) -> bool:
    at_this_level = [content]
    for _ in range(levels + 1):
        at_this_level = [
            each
            for holder in at_this_level
            if isinstance(holder, dict | list)
            for each in (holder.values() if isinstance(holder, dict) else holder)
        ]
    return bool(at_this_level)


def is_count(value: Any) -> TypeGuard[int]:
    """A whole number, not below zero, that 64 bits can hold. True and 1.0 are none."""
    return type(value) is int and 0 <= value < 2**63
