"""Opening a file of cells: h5ad through h5py, a zarr store through zarr. Both have named parts with `attrs`, and slices."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import h5py

from shardwise.errors import DataError, MissingExtra
from shardwise.tasks.cells.foreign import what_file, what_folder, what_hdf5


def opened(path: Path) -> Any:
    """The file, which stays open. A DataError says what it is, if it is no h5ad file and no zarr store."""
    if is_zarr(path):
        return _opened_zarr(path)
    if path.is_dir():
        raise DataError(f"{path} {what_folder(path)}")
    if not path.is_file():
        raise DataError(_not_there(path))
    try:
        content = h5py.File(path, "r")
    except OSError as error:
        raise DataError(f"{path} {_why_not(path, error)}") from None
    if "var" not in content or "mod" in content:
        what = what_hdf5(path, content)
        content.close()
        raise DataError(f"{path} {what}")
    return content


@contextmanager
def reading(path: Path) -> Iterator[Any]:
    content = opened(path)
    try:
        yield content
    finally:
        if isinstance(content, h5py.File):
            content.close()


def is_zarr(path: Path) -> bool:
    return path.is_dir() and any((path / name).exists() for name in (".zgroup", "zarr.json", ".zarray"))


def _opened_zarr(path: Path) -> Any:
    if find_spec("zarr") is None:
        raise MissingExtra.of("zarr", "cells", f"reading the zarr store {path}")
    import zarr

    try:
        content = zarr.open_group(str(path), mode="r")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} cannot be opened as a zarr store ({error}). It must be what adata.write_zarr(…) has written, whole"
        ) from None
    if "var" not in content:
        held = ", ".join(sorted(content)[:5]) or "nothing"
        raise DataError(f"{path} is a zarr store, but not of cells: it has no var. It holds {held}")
    return content


def missing_chunks(array: Any) -> str | None:
    """Zarr takes a chunk whose file is missing for zeros, or for empty texts, and says nothing."""
    if not hasattr(array, "nchunks_initialized"):
        return None
    missing = array.nchunks - array.nchunks_initialized  # below 0 where the last shard is not full
    return f"{missing} of the {array.nchunks} chunks of {array.path} are missing" if missing > 0 else None


def _not_there(path: Path) -> str:
    text = str(path)
    if "*" in text or "?" in text:
        found = sorted(path.parent.glob(path.name)) if path.parent.is_dir() else []
        some = f" It would match {', '.join(map(str, found[:5]))}." if found else ""
        return f"data.paths takes no patterns: there is no file {path}.{some} List the files one by one"
    if scheme := next(
        (s for s in ("s3", "gs", "gcs", "http", "https", "az", "hdfs") if text.startswith(f"{s}:/")), None
    ):
        address = text.replace(":/", "://", 1)  # a path keeps one slash of the two
        return (
            f"{address} is an address ({scheme}), and only files on disk are read. Download it, and name the copy in "
            "data.paths"
        )
    if os.path.lexists(path):
        return _no_file(path)
    near = []
    if path.parent.is_dir():
        near = sorted(other.name for ending in ("*.h5ad", "*.zarr") for other in path.parent.glob(ending))
    hint = f" In that folder: {', '.join(near[:5])}." if near else ""
    return f"there is no file {path}.{hint} Check data.paths"


def _no_file(path: Path) -> str:
    """Something that has this name, and is neither a file nor a folder."""
    if path.is_symlink():
        target = path.readlink()
        try:
            mode = path.stat().st_mode
        except FileNotFoundError:
            return f"{path} is a broken link: it leads to {target}, which is not there. Bring that back, or name the file itself"
        except OSError as error:
            return f"{path} is a link to {target} that leads nowhere ({error.strerror}). Name the file itself in data.paths"
    else:
        mode = path.stat().st_mode
    what = "a named pipe" if stat.S_ISFIFO(mode) else "a socket" if stat.S_ISSOCK(mode) else "a device"
    return f"{path} is not a regular file but {what}, and cannot be read in pieces. Write it to a file, and name that"


def _why_not(path: Path, error: OSError) -> str:
    """Why HDF5 does not open it, and what to do."""
    said = str(error)
    if "lock file" in said or error.errno in (errno.EAGAIN, errno.ENOLCK):
        if error.errno in (errno.ENOLCK, errno.ENOSYS):
            return (
                f"cannot be locked: its file system has no locks ({error.strerror or said}). Set the environment variable "
                "HDF5_USE_FILE_LOCKING=FALSE to read it without a lock"
            )
        return (
            f"is locked by another process{_holder(path)}, which has it open for writing. Close it there (a notebook with "
            "backed='r+', a program that still writes it) and start again. If nobody writes it, and the lock was left "
            "behind, set the environment variable HDF5_USE_FILE_LOCKING=FALSE"
        )
    if "h5clear" in said or "already open for write" in said:
        return (
            "is being written, or its writer died before it closed the file. Wait until it is written; if nobody writes it: "
            f"h5clear -s {path}, and check what is in it"
        )
    if isinstance(error, PermissionError) or error.errno == errno.EACCES:
        return f"may not be read by this user ({error.strerror or said}). Ask its owner, or: chmod +r {path}"
    if error.errno in (errno.EIO, errno.ESTALE, errno.ETIMEDOUT):
        return f"cannot be read from its disk ({error.strerror or said}): this is the storage, not the file. Try again later"
    if what := what_file(path):
        return what
    return f"cannot be opened as h5ad ({error}). Is it complete? A copy that was cut off looks like this"


def _holder(path: Path) -> str:
    """Who holds a lock on the file, where Linux tells."""
    try:
        about = path.stat()
        name = f":{about.st_ino}"
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            if len(fields) > 5 and fields[3] == "WRITE" and fields[5].endswith(name):
                program = Path(f"/proc/{fields[4]}/comm").read_text().strip()
                return f" ({program}, process {fields[4]})"
    except (OSError, ValueError):
        pass
    return ""
