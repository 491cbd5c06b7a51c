"""Images with their classes, read when they are asked for; the parts that every source has in common."""

from __future__ import annotations

import stat
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from shardwise.data.holdout import hold_out
from shardwise.errors import DataError
from shardwise.tasks.images.decode import Facts


class Pictures(ABC):
    """A list of images. `labels[i]` is the number of image i's class."""

    labels: np.ndarray
    place: str = ""
    """Where they come from; what was checked is remembered per place."""

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def open(self, index: int) -> Image.Image:
        """The image in RGB."""

    def name(self, index: int) -> str:
        """What a person would look for."""
        return f"image {index}"

    def key(self, index: int) -> str | None:
        """Changes whenever the stored image does; None where there is nothing to check."""
        return None

    def inspect(self, index: int) -> Facts:
        """Reads all of the stored image; a DataError says why it cannot be used. Asked for where there is a key."""
        raise NotImplementedError


@dataclass
class Subset(Pictures):
    whole: Pictures
    indices: np.ndarray

    def __post_init__(self) -> None:
        self.labels = self.whole.labels[self.indices]
        self.place = self.whole.place

    def open(self, index: int) -> Image.Image:
        return self.whole.open(int(self.indices[index]))

    def name(self, index: int) -> str:
        return self.whole.name(int(self.indices[index]))

    def key(self, index: int) -> str | None:
        return self.whole.key(int(self.indices[index]))

    def inspect(self, index: int) -> Facts:
        return self.whole.inspect(int(self.indices[index]))


def file_key(file: Path, name: str) -> str:
    """Changes whenever the file does. Copying tools set the time of a change at will, the time of the entry nobody does."""
    try:
        facts = file.stat()
    except OSError as error:
        gone = isinstance(error, FileNotFoundError)
        reason = "is gone, or a link that leads nowhere" if gone else f"cannot be looked at ({error.strerror})"
        it = "it" if name == str(file) else str(file)
        raise DataError(f"{name} cannot be read as an image: {it} {reason}") from None
    if not stat.S_ISREG(facts.st_mode):  # reading a pipe would wait forever
        raise DataError(f"{name} cannot be read as an image: it is not a file but a pipe, a socket or a device")
    return f"{file.absolute()}/{facts.st_size}/{facts.st_mtime_ns}/{facts.st_ctime_ns}"


@dataclass(frozen=True)
class ImageData:
    classes: list[str]
    train: Pictures
    valid: Pictures
    held_out: bool = False
    """Whether the validation images are a share of one pool, and not named by the user."""


def held_out(labels: np.ndarray, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices for training and for validation: the same share of every class, chosen by the seed."""
    train: list[np.ndarray] = []
    valid: list[np.ndarray] = []
    for label in np.unique(labels):
        of_class = np.flatnonzero(labels == label)
        kept, out = hold_out(len(of_class), fraction, seed, int(label))
        train.append(of_class[kept])
        valid.append(of_class[out])
    if not sum(len(part) for part in valid):
        raise DataError("no class has two images, so none can be held out for validation: add images")
    return np.sort(np.concatenate(train)), np.sort(np.concatenate(valid))
