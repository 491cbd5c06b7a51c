"""A data set of the Hugging Face hub, by name or from a folder. The one place where such a name is looked up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.errors import DataError, MissingExtra

if TYPE_CHECKING:
    from datasets import Dataset


def load_split(name: str, split: str, *, extra: str) -> Dataset:
    """One split of a data set. `extra` is what a user installs to have the library that reads it."""
    try:
        import datasets
    except ImportError:
        raise MissingExtra.of("datasets", extra, "data.source: hub") from None
    try:
        return datasets.load_dataset(name, split=split)
    except Exception as error:  # whatever a data set's own reader raises
        reason = str(error).splitlines()[0] if str(error) else repr(error)
        raise DataError(
            f"data.dataset: {name!r} (split {split!r}) is neither a folder that `datasets` can read nor found on the hub: "
            f"{reason}"
        ) from error


def require_column(dataset: Dataset, name: str, key: str, column: str) -> None:
    """`key` is what names the column in the config's data block."""
    if column not in dataset.column_names:
        raise DataError(f"data.{key}: {name!r} has no column {column!r}; it has {', '.join(dataset.column_names)}")
