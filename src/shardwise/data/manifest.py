"""The manifest of a folder of files that belong together, such as a checkpoint: every file with its size and checksum,
and its own. Without it, nothing is loaded."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

NAME = "manifest.json"
VERSION = 1


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
    with file.open("rb") as stream:
        return FileEntry(file.stat().st_size, hashlib.file_digest(stream, "sha256").hexdigest())


def write_manifest(folder: Path, files: dict[str, FileEntry], about: dict[str, Any]) -> None:
    """Last of all files: it names every other one. Flushed, with the folder, before this returns."""
    content = {
        "version": VERSION,
        "about": about,
        "files": {name: asdict(entry) for name, entry in sorted(files.items())},
    }
    file = folder / NAME
    file.write_text(_sealed(content))
    flush(file)
    flush(folder)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The content of a manifest; ValueError says what is wrong with it."""
    try:
        text = (folder / NAME).read_text()
        content = json.loads(text)
    except FileNotFoundError:
        raise ValueError("there is no manifest, so it was never finished") from None
    except (NotADirectoryError, IsADirectoryError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"the manifest cannot be read: {error}") from None
    except OSError as error:
        raise Unreadable(f"the manifest cannot be read: {error.strerror}") from None
    if _is_newer(content):
        raise NewerVersion(
            f"a newer shardwise wrote it: manifest version {content['version']}, known here up to {VERSION}"
        )
    if not isinstance(content, dict) or content.get("version") != VERSION:
        raise ValueError(f"the manifest is not of version {VERSION}")
    if text != _sealed({key: value for key, value in content.items() if key != "sha256"}):
        raise ValueError("the manifest has changed: its checksum does not match")
    return content


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
    except (ValueError, KeyError) as error:
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
            about = file.stat()
        except (FileNotFoundError, NotADirectoryError):
            about = None
        if about is None or file.parent != folder or not stat.S_ISREG(about.st_mode):
            return f"{name} is missing"
        if about.st_size != entry["size"]:
            return f"{name} has {about.st_size} bytes instead of {entry['size']}"
        if contents and mine and entry_of(file).sha256 != entry["sha256"]:
            return f"{name} has changed: its checksum does not match"
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
