"""A Hugging Face data set of images, by name or from a folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from shardwise.data.hub import load_split, require_column
from shardwise.errors import DataError
from shardwise.tasks.images.config import ImagesData
from shardwise.tasks.images.decode import WHITE, Background, Facts, decode, inspect
from shardwise.tasks.images.pictures import Pictures

if TYPE_CHECKING:
    from datasets import Dataset


class HubImages(Pictures):
    def __init__(
        self, images: Dataset, labels: list[int], column: str, place: str, background: Background = WHITE
    ) -> None:
        self.images, self.labels, self.column, self.place = images, np.array(labels), column, place
        self.background = background

    def open(self, index: int) -> Image.Image:
        return decode(self._stored(index), self.name(index), self.background)

    def inspect(self, index: int) -> Facts:
        stored = self._stored(index)
        try:
            content = stored if isinstance(stored, bytes) else stored.read_bytes()
        except OSError as error:
            raise DataError(f"{self.name(index)} cannot be read as an image: {error}") from None
        return inspect(content, self.name(index))

    def _stored(self, index: int) -> bytes | Path:
        stored = self.images[index][self.column]
        if not stored or not (stored.get("bytes") or stored.get("path")):
            raise DataError(f"{self.name(index)} cannot be read as an image: {self.column!r} is empty")
        return stored["bytes"] or Path(stored["path"])

    def name(self, index: int) -> str:
        return f"{self.place}, row {index}"

    def key(self, index: int) -> str:
        return f"{self.images._fingerprint}/{index}"


def read_hub(options: ImagesData) -> tuple[list[str], HubImages, HubImages | None]:
    """The names of the classes, the rows to train on, and those to validate on if a split is named for it."""
    dataset = _with_columns(options, options.split)
    classes = options.classes or _classes(dataset, options)
    if len(classes) < 2:
        raise DataError(f"data.label_column: {options.label_column!r} of {options.dataset!r} has {len(classes)} class: "
                        "to tell classes apart, it needs two or more")  # fmt: skip
    train = _rows(dataset, options, options.split, classes)
    if options.valid_split is None:
        return classes, train, None
    return classes, train, _rows(_with_columns(options, options.valid_split), options, options.valid_split, classes)


def _with_columns(options: ImagesData, split: str) -> Dataset:
    dataset = load_split(str(options.dataset), split, extra="images")
    for key in ("image_column", "label_column"):
        require_column(dataset, str(options.dataset), key, getattr(options, key))
    return dataset


def _classes(dataset: Dataset, options: ImagesData) -> list[str]:
    """The names that the data set declares, or the values that there are, sorted."""
    if names := _declared(dataset, options):
        return names
    return [str(value) for value in sorted({value for value in dataset[options.label_column] if _is_label(value)})]


def _declared(dataset: Dataset, options: ImagesData) -> list[str]:
    """What the data set says that its numbers mean."""
    return list(getattr(dataset.features[options.label_column], "names", None) or [])


def _is_label(value: Any) -> bool:
    return value is not None and value != -1 and value != ""


def _rows(dataset: Dataset, options: ImagesData, split: str, classes: list[str]) -> HubImages:
    import datasets

    place = f"{options.dataset} ({split})"
    values: Sequence[Any] = dataset[options.label_column]
    declared = _declared(dataset, options)
    # A number is an index into what data.classes says. Where that has the declared names in another order, or some of them, it
    # is meant to choose among them, and not to call a cat a dog: then names decide. What is not a number is a name anyway.
    if declared and declared != classes and set(declared) & set(classes):
        values = [declared[value] if isinstance(value, int) and value >= 0 else value for value in values]
        by_number = False
    else:
        by_number = bool(declared or options.classes)
    labels = _labels(values, classes, by_number, place, options.label_column)
    images = dataset.select_columns([options.image_column])
    try:
        images = images.cast_column(options.image_column, datasets.Image(decode=False))
    except Exception as error:  # pyarrow and datasets raise several kinds
        kind = dataset.features[options.image_column]
        raise DataError(
            f"data.image_column: {options.image_column!r} of {options.dataset!r} does not hold images, but {kind}"
        ) from error
    red, green, blue = options.background
    return HubImages(images, labels, options.image_column, place, (red, green, blue))


def _labels(values: Sequence[Any], classes: list[str], by_number: bool, place: str, column: str) -> list[int]:
    numbers = {name: number for number, name in enumerate(classes)}
    labels: list[int] = []
    for row, value in enumerate(values):
        if not _is_label(value):
            raise DataError(f"{place}, row {row} has no label ({column!r} is {value!r}): leave such rows out")
        number = value if by_number and isinstance(value, int) else numbers.get(str(value), -1)
        if not 0 <= number < len(classes):
            raise DataError(f"{place}, row {row}: label {value!r} is not one of the {len(classes)} classes "
                            f"({', '.join(classes[:5])}{', …' if len(classes) > 5 else ''})")  # fmt: skip
        labels.append(number)
    return labels
