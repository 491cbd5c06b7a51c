"""A data set of the Hugging Face hub, by name or from a folder. The one place where such a name is looked up."""

from __future__ import annotations

import json
import logging
import re
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.config.hub import looks_like_a_hub_name
from shardwise.data.cache import cache_name, file_stamp
from shardwise.errors import DataError, MissingExtra, one_line

if TYPE_CHECKING:
    from datasets import Dataset

log = logging.getLogger(__name__)

_STATE = "state.json"
"""In each folder that `Dataset.save_to_disk` has written: it names the files with the rows. Others, which `datasets` keeps beside
them, hold what was once computed of the rows."""


def load_split(name: str, split: str, *, extra: str, classes_of: str | None = None) -> Dataset:
    """One split of a data set. `extra` is what a user installs to have the library that reads it. `classes_of`: a column of
    classes, of which every file must say the same."""
    try:
        import datasets  # noqa: F401
    except ImportError:
        raise MissingExtra.of("datasets", extra, "data.source: hub") from None
    folder, what = Path(name), f"data.dataset: {name!r} (split {split!r})"
    if folder.is_file():
        raise DataError(f"{what} is a file: name the folder that it lies in")
    if not folder.exists() and not looks_like_a_hub_name(name):
        raise DataError(
            f"{what} is neither a folder (looked for from {Path.cwd()}) nor a name on the hub: those look like owner/name"
        )
    with _listening() as said:
        try:
            saved = _saved_splits(folder)
            dataset = _load_built(name, split, classes_of) if saved is None else _load_saved(name, split, saved)
        except DataError:
            raise
        except Exception as error:  # whatever a data set's own reader raises
            reason = one_line(said[-1] if said else error.__cause__ or str(error) or repr(error))
            if folder.exists():
                raise DataError(f"{what} cannot be read: {reason}") from error
            raise DataError(
                f"{what} is neither a folder that `datasets` can read nor found on the hub: {reason}"
            ) from error
    if not len(dataset):
        raise DataError(f"{what} has no rows")
    return dataset


def require_column(dataset: Dataset, name: str, key: str, column: str) -> None:
    """`key` is what names the column in the config's data block."""
    if column not in dataset.column_names:
        raise DataError(f"data.{key}: {name!r} has no column {column!r}; it has {', '.join(dataset.column_names)}")


def _saved_splits(folder: Path) -> dict[str, Path] | None:
    """The folders that `save_to_disk` has written, by the names of the splits; None where it was not at work."""
    if (folder / _STATE).is_file():
        return {"train": folder}  # a data set without splits
    inside = sorted(folder.iterdir()) if folder.is_dir() else []
    splits = {path.name: path for path in inside if (path / _STATE).is_file()}
    return splits if splits or (folder / "dataset_dict.json").is_file() else None


def _load_saved(name: str, split: str, splits: Mapping[str, Path]) -> Dataset:
    import datasets

    asked = _require_splits(name, split, splits)
    parts = {each: _read_saved(splits[each]) for each in asked}
    found = []
    spec = "+".join(splits) if split == "all" else split
    for part in datasets.ReadInstruction.from_spec(spec).to_absolute({each: len(parts[each][0]) for each in asked}):
        rows, stamp = parts[part.splitname]
        # The stored fingerprint stays as it is when a file changes.
        fingerprint = cache_name("saved", part.from_, part.to, stamp)
        found.append(rows.select(range(part.from_ or 0, part.to or 0), new_fingerprint=fingerprint))
    return found[0] if len(found) == 1 else datasets.concatenate_datasets(found)


def _read_saved(folder: Path) -> tuple[Dataset, list[Any]]:
    """The rows, and what changes when their files do."""
    import datasets

    files = [folder / each["filename"] for each in json.loads((folder / _STATE).read_text())["_data_files"]]
    if missing := [file for file in files if not file.is_file()]:
        raise DataError(
            f"data.dataset: {missing[0]} is not there, and {folder / _STATE} says that it should be: copy the folder again"
        )
    if not files:
        raise DataError(f"data.dataset: {folder} has no rows")
    try:
        rows = datasets.load_from_disk(str(folder)).with_format(None)  # a format that was saved would give tensors
    except Exception:
        for file in files:
            try:
                datasets.Dataset.from_file(str(file))
            except Exception as error:
                raise DataError(
                    f"data.dataset: {file} is damaged or cut off ({one_line(error)}): copy it again"
                ) from error
        raise
    return rows, file_stamp(*files, folder / "dataset_info.json")


def _load_built(name: str, split: str, classes_of: str | None) -> Dataset:
    import datasets

    builder = datasets.load_dataset_builder(name)
    builder.download_and_prepare()
    asked = _require_splits(name, split, builder.info.splits)
    if not any(builder.info.splits[each].num_examples for each in asked):
        raise DataError(f"data.dataset: {name!r} (split {split!r}) has no rows")
    dataset = builder.as_dataset(split)
    for each, files in (builder.config.data_files or {}).items():
        if classes_of is not None and classes_of in dataset.features and str(each) in asked:
            _require_same_classes([Path(file) for file in files], classes_of, dataset.features[classes_of])
    return dataset


def _require_splits(name: str, split: str, there: Collection[str]) -> list[str]:
    """The names of the splits in an expression such as train[:50%]+test."""
    if split == "all":
        return list(there)
    asked = list(dict.fromkeys(re.split(r"[\[(]", part)[0].strip() for part in split.split("+")))
    if not set(asked) <= set(there):
        raise DataError(f"data.dataset: {name!r} has no split {split!r}; it has {', '.join(there) or 'none'}")
    return asked


def _require_same_classes(files: list[Path], column: str, feature: Any) -> None:
    """Each file has numbers, and may say which names they stand for. `datasets` (5.2) takes the first one's for all."""
    import datasets
    from pyarrow import ipc, parquet

    for file in files:
        if file.suffix not in (".parquet", ".arrow") or not file.is_file():  # what lies on the hub is no file here
            continue
        if file.suffix == ".parquet":
            schema = parquet.read_schema(file)
        else:
            with file.open("rb") as stream:
                is_file = stream.read(6) == b"ARROW1"  # of Arrow's two formats
                stream.seek(0)
                schema = (ipc.open_file if is_file else ipc.open_stream)(stream).schema
        names = getattr(datasets.Features.from_arrow_schema(schema).get(column), "names", None)
        if names is not None and names != getattr(feature, "names", names):
            raise DataError(
                f"data.label_column: in {file} the numbers of {column!r} stand for {_first(names)}, and in other files of the "
                f"data set for {_first(feature.names)}. `datasets` reads all by the same names, so labels would be wrong: write "
                "the files with the same classes in the same order, or save both splits together with save_to_disk"
            )


def _first(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", …" if len(names) > 5 else "")


@contextmanager
def _listening() -> Iterator[list[str]]:
    """The errors that `datasets` logs, which name the file, instead of lines on the screen; its warnings are logged as ours."""
    theirs, listener = logging.getLogger("datasets"), _Listener()
    before = theirs.handlers, theirs.propagate
    theirs.handlers, theirs.propagate = [listener], False
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"datasets\.")
            yield listener.errors
    finally:
        theirs.handlers, theirs.propagate = before


class _Listener(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.errors: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR:
            self.errors.append(record.getMessage())
        elif record.levelno == logging.WARNING:
            log.warning(one_line(record.getMessage()))
