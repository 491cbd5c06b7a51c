"""The manifest of a folder of files that belong together, such as a checkpoint: every file with its size and checksum,
and its own. Without it, nothing is loaded."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardwise.config.plain_files import (
    MOST_LEVELS,
    NotPlain,
    is_count,
    open_plain,
    parse_json,
    plain_size,
    read_plain,
)

NAME = "manifest.json"
VERSION = 1
MOST_BYTES = 2**24
"""Of a manifest: a hundred thousand files."""
_FILE_NAME = re.compile(r"\w[\w.-]{0,200}", re.ASCII)
_SEAL = re.compile(rb',\n "sha256": "([0-9a-f]{64})"\n}\Z')


@dataclass(frozen=True)
class FileEntry:
    size: int
    sha256: str


@dataclass(frozen=True)
class Condition:
    """What a look at a folder found. Whole, if there is nothing."""

    damage: list[str]
    """Files that are missing, cut or changed."""
    unreadable: list[str]
    """Files that storage did not give: it may be back in a minute, and they may well be whole."""
    newer: str = ""
    """Of which version the manifest is, where a newer shardwise wrote it: nothing is known of its files then."""

    @property
    def problems(self) -> list[str]:
        return [*self.damage, *self.unreadable, *([self.newer] if self.newer else [])]


class Unreadable(ValueError):
    """Storage did not give the manifest, though one is there."""


class NewerVersion(ValueError):
    """A newer shardwise wrote the manifest. What else is in it may mean something else than it does here."""


def entry_of(file: Path) -> FileEntry:
    """ValueError: it is no regular file."""
    with open_plain(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        return FileEntry(size, hashlib.file_digest(stream, "sha256").hexdigest())


def write_manifest(folder: Path, files: dict[str, FileEntry], about: dict[str, Any]) -> None:
    """Last of all files: it names every other one. Flushed, with the folder, before this returns."""
    content = {
        "version": VERSION,
        "about": about,
        "files": {name: asdict(entry) for name, entry in sorted(files.items())},
    }
    file, text = folder / NAME, _sealed(content)
    if len(text) > MOST_BYTES:  # said while the files are still there, and not when they are needed
        raise OSError(errno.EFBIG, f"a manifest of {len(text)} bytes is larger than any that is read", str(file))
    file.write_text(text)
    flush(file)
    flush(folder)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The content of a manifest; ValueError says what is wrong with it. Whoever wrote it, its types and names are right."""
    try:
        data = read_plain(folder / NAME, MOST_BYTES)
        content = parse_json(data, MOST_LEVELS)
    except FileNotFoundError:
        raise ValueError("there is no manifest, so it was never finished") from None
    except (NotADirectoryError, ValueError) as error:
        raise ValueError(f"the manifest cannot be read: {error}") from None
    except OSError as error:
        raise Unreadable(f"the manifest cannot be read: {error.strerror}") from None
    if _is_newer(content):
        raise NewerVersion(
            f"a newer shardwise wrote it: manifest version {content['version']}, known here up to {VERSION}"
        )
    if not isinstance(content, dict) or content.get("version") != VERSION:
        raise ValueError(f"the manifest is not of version {VERSION}")
    if not _is_sealed(data):
        raise ValueError("the manifest has changed: its checksum does not match")
    _check_content(content)
    return content


def _check_content(content: dict[str, Any]) -> None:
    """The checksum has no key: a manifest that passes it may have been written by anybody."""
    files, about = content.get("files"), content.get("about")
    if not isinstance(files, dict) or not isinstance(about, dict):
        raise ValueError("the manifest has no list of files")
    if not files:
        raise ValueError("the manifest lists no files")
    for name, entry in files.items():
        if not is_file_name(name):
            raise ValueError(f"the manifest lists {name!r:.80}, which is not the name of a file beside it")
        if not isinstance(entry, dict) or not is_count(entry.get("size")) or not _is_digest(entry.get("sha256")):
            raise ValueError(f"the manifest does not have size and checksum of {name}")


def is_file_name(value: Any) -> bool:
    """Of a file beside the manifest, and nowhere else."""
    return isinstance(value, str) and _FILE_NAME.fullmatch(value) is not None


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) is not None


def _is_sealed(data: bytes) -> bool:
    """Whether the text is one that `_sealed` makes: it is compared as it stands, before anything in it is believed."""
    seal = _SEAL.search(data, max(0, len(data) - 100))
    return seal is not None and hashlib.sha256(data[: seal.start()] + b"\n}").hexdigest() == seal[1].decode()


def _is_newer(content: Any) -> bool:
    """Every version has its number under this key. One that the checksum contradicts is a flipped bit."""
    version = content.get("version") if isinstance(content, dict) else None
    if type(version) is not int or version <= VERSION:
        return False
    as_ours = {**content, "version": VERSION}
    return _checksum({key: value for key, value in as_ours.items() if key != "sha256"}) != content.get("sha256")


def _sealed(content: dict[str, Any]) -> str:
    """The text of a manifest, with a checksum of everything else in it: it guards the files, this guards it."""
    return json.dumps({**content, "sha256": _checksum(content)}, indent=1)


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, indent=1).encode()).hexdigest()


def problems_of(folder: Path, *, contents: bool = True) -> list[str]:
    """Everything that keeps a folder from being used. Empty means whole."""
    return condition_of(folder, contents=contents).problems


def condition_of(folder: Path, *, contents: bool = True, part: tuple[int, int] = (0, 1)) -> Condition:
    """What the manifest names must be there and whole; what it does not name is nobody's business.

    Without `contents`, sizes are compared and checksums are not: instant, for data too large to be read twice. With
    `part` k of n, the checksums of every n-th file are, so that n processes share them.
    """
    try:
        files: dict[str, dict[str, Any]] = read_manifest(folder)["files"]
    except Unreadable as error:
        return Condition([], [str(error)])
    except NewerVersion as error:
        return Condition([], [], str(error))
    except ValueError as error:
        return Condition([str(error)], [])
    number, of = part
    damage, unreadable = [], []

    def look(place: int, name: str) -> tuple[str | None, str | None]:
        try:
            return damage_of(name, files[name], place % of == number), None
        except OSError as error:
            return None, f"{name} cannot be read: {error.strerror}"

    def damage_of(name: str, entry: dict[str, Any], mine: bool) -> str | None:
        file = folder / name
        try:
            size = plain_size(file)
            if size != entry["size"]:
                return f"{name} has {size} bytes instead of {entry['size']}"
            if contents and mine and entry_of(file).sha256 != entry["sha256"]:
                return f"{name} has changed: its checksum does not match"
        except (FileNotFoundError, NotADirectoryError):
            return f"{name} is missing"
        except NotPlain as error:
            return str(error)
        return None

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # a checksum lets other threads run
        for damaged, unread in pool.map(look, range(len(files)), files):
            damage += [damaged] if damaged else []
            unreadable += [unread] if unread else []
    return Condition(damage, unreadable)


def surplus_in(folder: Path) -> list[str]:
    """Files that the manifest does not name, such as those that a file manager or NFS leaves: they do no harm."""
    return sorted({file.name for file in folder.iterdir()} - set(read_manifest(folder)["files"]) - {NAME})


def flush(path: Path) -> None:
    """Make sure that a file's bytes, or a folder's entries, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
