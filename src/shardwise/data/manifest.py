"""The manifest of a folder of files that belong together, such as a checkpoint: every file with its size and checksum,
and its own. Without it, nothing is loaded."""

from __future__ import annotations

import hashlib
import json
import os
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
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"the manifest cannot be read: {error}") from None
    if not isinstance(content, dict) or content.get("version") != VERSION:
        raise ValueError(f"the manifest is not of version {VERSION}")
    if text != _sealed({key: value for key, value in content.items() if key != "sha256"}):
        raise ValueError("the manifest has changed: its checksum does not match")
    return content


def _sealed(content: dict[str, Any]) -> str:
    """The text of a manifest, with a checksum of everything else in it: it guards the files, this guards it."""
    checksum = hashlib.sha256(json.dumps(content, indent=1).encode()).hexdigest()
    return json.dumps({**content, "sha256": checksum}, indent=1)


def problems_of(folder: Path, *, contents: bool = True, part: tuple[int, int] = (0, 1)) -> list[str]:
    """Everything that is wrong with a folder: missing, cut, changed or surplus files. Empty means whole.

    Without `contents`, sizes are compared and checksums are not: instant, for data too large to be read twice. With
    `part` k of n, the checksums of every n-th file are, so that n processes share them.
    """
    try:
        files: dict[str, dict[str, Any]] = read_manifest(folder)["files"]
    except (ValueError, KeyError) as error:
        return [str(error)]
    number, of = part

    def problem(place: int, name: str) -> str | None:
        try:
            return found_in(place, name)
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"

    def found_in(place: int, name: str) -> str | None:
        file, entry = folder / name, files[name]
        if Path(name).name != name or not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != entry["size"]:
            return f"{name} has {file.stat().st_size} bytes instead of {entry['size']}"
        if contents and place % of == number and entry_of(file).sha256 != entry["sha256"]:
            return f"{name} has changed: its checksum does not match"
        return None

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # a checksum lets other threads run
        problems = [found for found in pool.map(problem, range(len(files)), files) if found]
    surplus = {file.name for file in folder.iterdir()} - set(files) - {NAME}
    return problems + [f"{name} does not belong to it" for name in sorted(surplus)]


def flush(path: Path) -> None:
    """Make sure that a file's bytes, or a folder's entries, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
