"""The errors a user meets: each says what is wrong, where, and what to do."""

from __future__ import annotations

import os


class ShardwiseError(Exception):
    """Bad input or a failed run. The message is written for a person; no traceback is needed to act on it."""


class ConfigError(ShardwiseError):
    """The YAML file or an override is wrong."""


class DataError(ShardwiseError):
    """A file or a sample cannot be used."""


class MissingExtra(ShardwiseError):
    """An optional package is needed and not installed."""

    @classmethod
    def of(cls, package: str, extra: str, purpose: str) -> MissingExtra:
        return cls(f"{purpose} needs the package {package!r}: pip install 'shardwise[{extra}]'")


class LaunchError(ShardwiseError):
    """The ranks cannot be started, or one of them failed."""


class CheckpointError(ShardwiseError):
    """A checkpoint is missing, damaged or of another run."""


class StorageLost(CheckpointError):
    """A folder that the run writes to was deleted, moved or unmounted under it."""


class NonFiniteError(ShardwiseError):
    """The loss or the gradient is no longer a number."""


class LossSpike(ShardwiseError):
    """The loss is far above what it was."""


class NoSum(ShardwiseError):
    """The loss is not a sum over samples, or its count not theirs."""


class OutOfMemory(ShardwiseError):
    """A device has no room for what the run asks of it."""


class NoRoom(ShardwiseError):
    """A folder of this machine that a run needs is full."""

    @classmethod
    def of(cls, folder: str | os.PathLike[str], purpose: str, remedy: str) -> NoRoom:
        return cls(f"there is no room {purpose}: {room_in(folder)}. {remedy}")

    @classmethod
    def in_shared_memory(cls, purpose: str, *instead: str) -> NoRoom:
        return cls.of(SHARED_MEMORY, purpose, ", or ".join([MORE_SHARED_MEMORY, *instead]))


SHARED_MEMORY = "/dev/shm"
MORE_SHARED_MEMORY = f"Give it more (docker run --shm-size=8g; as root: mount -o remount,size=8g {SHARED_MEMORY})"


def room_in(folder: str | os.PathLike[str]) -> str:
    try:
        about = os.statvfs(folder)
    except OSError as error:
        return f"{folder} cannot be used: {error.strerror}"
    free, size = (f"{blocks * about.f_frsize / 2**20:.1f} MiB" for blocks in (about.f_bavail, about.f_blocks))
    return f"{folder} has {free} free of {size}" + (
        "" if about.f_favail or not about.f_files else ", and takes no more files"
    )


def one_line(said: object, most: int = 300) -> str:
    """What an error says, which may be many lines, as a line of so many characters at most."""
    return " ".join(str(said).split())[:most]
