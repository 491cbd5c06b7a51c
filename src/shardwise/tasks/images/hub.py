"""A Hugging Face data set of images, by name or from a folder."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from shardwise.data.hub import load_split, require_column
from shardwise.errors import DataError
from shardwise.tasks.images.config import ImagesData
from shardwise.tasks.images.decode import WHITE, Background, Facts, decode, inspect
from shardwise.tasks.images.names import SHOWN, numbers_of, one_form
from shardwise.tasks.images.pictures import Pictures, file_key

if TYPE_CHECKING:
    from datasets import Dataset

log = logging.getLogger(__name__)

_KINDS = ("string", "large_string", "int", "uint", "bool", "float", "double", "null")
"""How the names of types begin whose values can be classes."""


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
        file = self._files[index]
        beside = f"/{file_key(Path(file), self.name(index))}" if file else ""
        return f"{self.images._fingerprint}/{index}{beside}"

    @cached_property
    def _files(self) -> list[str | None]:
        """Of each image, the file that it is, where its bytes are not in the rows."""
        from pyarrow import compute

        files: list[str | None] = []
        for table in self.images.with_format("arrow").iter(batch_size=1000):
            column = table[self.column]
            has_none = compute.is_null(compute.struct_field(column, "bytes"))
            files += compute.if_else(has_none, compute.struct_field(column, "path"), None).to_pylist()
        return files


def read_hub(options: ImagesData) -> tuple[list[str], HubImages, HubImages | None]:
    """The names of the classes, the rows to train on, and those to validate on if a split is named for it."""
    dataset = _with_columns(options, options.split)
    declared = _declared(dataset, options)
    classes = options.classes or declared or _values(dataset, options, options.split)
    if len(classes) < 2:
        raise DataError(f"data.label_column: {options.label_column!r} of {options.dataset!r} has {len(classes)} class: "
                        "to tell classes apart, it needs two or more")  # fmt: skip
    # A number is an index into what data.classes says. Where that has the declared names in another order, or some of them, it
    # is meant to choose among them, and not to call a cat a dog: then names decide. What is not a number is a name anyway.
    numbers = numbers_of(classes)
    if declared and not numbers.keys() & numbers_of(declared).keys():
        numbers = numbers_of(declared)
        _tell_renamed(declared, classes)
    by_number = bool(options.classes) and not declared
    train = _rows(dataset, options, options.split, classes, numbers, by_number)
    if options.valid_split is None:
        return classes, train, None
    valid = _with_columns(options, options.valid_split)
    return classes, train, _rows(valid, options, options.valid_split, classes, numbers, by_number)


def _with_columns(options: ImagesData, split: str) -> Dataset:
    dataset = load_split(str(options.dataset), split, extra="images", classes_of=options.label_column)
    for key in ("image_column", "label_column"):
        require_column(dataset, str(options.dataset), key, getattr(options, key))
    feature = dataset.features[options.label_column]
    if not str(getattr(feature, "dtype", "")).startswith(_KINDS):
        raise DataError(
            f"data.label_column: {options.label_column!r} of {options.dataset!r} holds {feature}, and not one class per image: "
            "name a column with a number or a name in each row"
        )
    return dataset


def _declared(dataset: Dataset, options: ImagesData) -> list[str]:
    """What the data set says that its numbers mean."""
    return list(getattr(dataset.features[options.label_column], "names", None) or [])


def _tell_renamed(declared: list[str], classes: list[str]) -> None:
    pairs = [f"{old} is called {new}" for old, new in zip(declared, classes, strict=False)]
    log.info(
        f"data.classes has none of the names that the data set declares, and stands in their place: {', '.join(pairs[:SHOWN])}"
        f"{', …' if len(pairs) > SHOWN else ''}"
    )


def _values(dataset: Dataset, options: ImagesData, split: str) -> list[str]:
    """The values that there are, sorted."""
    labels = _stored_labels(dataset, options, f"{options.dataset} ({split})")
    there = {one_form(value) if isinstance(value, str) else value for value in labels if _is_label(value)}
    return [str(value) for value in sorted(there)]


def _stored_labels(dataset: Dataset, options: ImagesData, place: str) -> Sequence[Any]:
    values: Sequence[Any] = dataset[options.label_column]
    if not dataset.features[options.label_column].dtype.startswith(("float", "double")):
        return values
    # Whole numbers become these in a table where some are missing.
    labels = [int(value) if value is not None and float(value).is_integer() else value for value in values]
    for row, value in enumerate(labels):
        if isinstance(value, float) and not np.isnan(value):
            raise DataError(
                f"{place}, row {row}: label {value:g} ({options.label_column!r}) is no whole number, but a quantity, and no "
                "class. Name a column of classes; or, if these are classes all the same, make strings of them"
            )
    return labels


def _is_label(value: Any) -> bool:
    return value is not None and value not in (-1, "") and value == value  # a number that is missing may be NaN


def _rows(
    dataset: Dataset, options: ImagesData, split: str, classes: list[str], numbers: dict[str, int], by_number: bool
) -> HubImages:
    """`numbers`: which class each name is that stands in the data. Each split may declare its names in an order of its own."""
    place = f"{options.dataset} ({split})"
    values = _stored_labels(dataset, options, place)
    declared = _declared(dataset, options)
    if declared:
        known = range(len(declared))
        values = [declared[value] if value is not None and value in known else value for value in values]
    labels = _labels(values, classes, numbers, by_number, place, options.label_column)
    red, green, blue = options.background
    return HubImages(_undecoded(dataset, options), labels, options.image_column, place, (red, green, blue))


def _undecoded(dataset: Dataset, options: ImagesData) -> Dataset:
    import datasets

    column = options.image_column
    images, kind = dataset.select_columns([column]), dataset.features[column]
    refusal = f"data.image_column: {column!r} of {options.dataset!r} does not hold images, but {kind}"
    if isinstance(kind, datasets.List) and not _fits_bytes(images, column):
        raise DataError(f"{refusal}, with numbers outside 0 to 255: choose which of them become black and white")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Downcasting array dtype")  # of numbers that fit
            return images.cast_column(column, datasets.Image(decode=False))
    except Exception as error:  # pyarrow and datasets raise several kinds
        raise DataError(refusal) from error


def _fits_bytes(images: Dataset, column: str) -> bool:
    """Whether lists of numbers are bytes: `datasets` (5.2) would cut them to their last eight bits."""
    from pyarrow import compute, types

    for table in images.with_format("arrow").iter(batch_size=1000):
        values = table[column].combine_chunks()
        while types.is_list(values.type):
            values = values.flatten()
        extremes = compute.min_max(values).as_py() if types.is_integer(values.type) else {}
        if (extremes.get("min") or 0) < 0 or (extremes.get("max") or 0) > 255:
            return False
    return True


def _labels(
    values: Sequence[Any], classes: list[str], names: dict[str, int], by_number: bool, place: str, column: str
) -> list[int]:
    labels: list[int] = []
    for row, value in enumerate(values):
        if not _is_label(value):
            raise DataError(f"{place}, row {row} has no label ({column!r} is {value!r}): leave such rows out")
        number = value if by_number and isinstance(value, int) else names.get(one_form(str(value)), -1)
        if not 0 <= number < len(classes):
            raise DataError(f"{place}, row {row}: label {value!r} is not one of the {len(classes)} classes "
                            f"({', '.join(classes[:SHOWN])}{', …' if len(classes) > SHOWN else ''})")  # fmt: skip
        labels.append(number)
    return labels
