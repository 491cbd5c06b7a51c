"""Images with their classes, read when they are asked for; the parts that every source has in common."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from shardwise.data.holdout import hold_out
from shardwise.errors import DataError

DEEP_MODES = ("I", "F", "I;16", "I;16L", "I;16B", "I;16N")
"""More than eight bits per value: Pillow would cut them off at 255 without a word."""


class Pictures(ABC):
    """A list of images. `labels[i]` is the number of image i's class."""

    labels: np.ndarray
    place: str = ""
    """Where they come from; what was checked is remembered per place."""

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def open(self, index: int, *, reduced: bool = False) -> Image.Image:
        """The image in RGB. `reduced`: all of it is read, but it may come out smaller where that is faster."""

    def name(self, index: int) -> str:
        """What a person would look for."""
        return f"image {index}"

    def key(self, index: int) -> str | None:
        """Changes whenever the stored image does; None where there is nothing to check."""
        return None


@dataclass
class Subset(Pictures):
    whole: Pictures
    indices: np.ndarray

    def __post_init__(self) -> None:
        self.labels = self.whole.labels[self.indices]
        self.place = self.whole.place

    def open(self, index: int, *, reduced: bool = False) -> Image.Image:
        return self.whole.open(int(self.indices[index]), reduced=reduced)

    def name(self, index: int) -> str:
        return self.whole.name(int(self.indices[index]))

    def key(self, index: int) -> str | None:
        return self.whole.key(int(self.indices[index]))


@dataclass(frozen=True)
class ImageData:
    classes: list[str]
    train: Pictures
    valid: Pictures


def decode(source: Path | bytes, name: str, *, reduced: bool = False) -> Image.Image:
    """An image file as RGB, decoded to its last byte."""
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            if reduced:
                image.draft("RGB", (1, 1))  # JPEG at an eighth of its size: every byte is still read
            if image.mode not in DEEP_MODES:
                return image.convert("RGB")  # which reads all of it
            mode = image.mode
    except Exception as error:  # Pillow's plugins raise what they like: SyntaxError, zlib.error, struct.error
        raise DataError(f"{name} cannot be read as an image: {_reason(error)}") from None
    raise DataError(f"{name} cannot be read as an image: it has more than 8 bits per value (mode {mode}); convert it")


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


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "it is gone"
    text = str(error)
    return "not a kind of image that Pillow knows" if "cannot identify image file" in text else text or repr(error)
