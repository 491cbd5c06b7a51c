"""A sharded copy of cells, made to be read fast: Arrow files that are mapped into memory, rows in random order.

folder/
  manifest.json         every file with size and checksum; genes, labels, where the cells came from
  train-00000.arrow     cells to train on, shuffled over the whole corpus
  valid-00000.arrow     cells held out
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from shardwise.config.commands import command
from shardwise.data.manifest import problems_of, read_manifest
from shardwise.errors import DataError
from shardwise.tasks.cells.rows import Ints, SeveralFiles, SparseRows
from shardwise.tasks.cells.sources import check_format

KIND = "cells"
"""In the manifest: what the folder holds."""


@dataclass(frozen=True)
class ShardedCopy:
    genes: list[str]
    counts: bool
    training: ShardFiles
    validation: ShardFiles
    seed: int
    made_with: dict[str, Any]
    """The keys of the data block that it was made with and that are fixed now."""
    values: str | None
    """What its values look like, for a person."""
    made_by: str
    """The version of shardwise."""
    sources: list[dict[str, Any]]
    """See sources.py."""


class ShardFiles(SeveralFiles["_Shard"]):
    """A CellSource. Nothing is read before it is asked for; a slice is copied from the mapped file, not parsed."""

    def __init__(
        self, files: Sequence[Path], cells: Sequence[int], label_names: list[str], origin: str, genes: int
    ) -> None:
        super().__init__(cells)
        self.files, self.label_names, self.origin, self.genes = files, label_names, origin, genes

    def _read_one(self, number: int, first: int, last: int) -> SparseRows:
        rows = self._opened(number).read(first, last)
        if rows is None or not _are_cells(rows, self.genes):
            raise self._damaged(number, f"the cells {first} to {last - 1} hold what no cell can")
        return rows

    def _damaged(self, number: int, what: str) -> DataError:
        """Sizes are compared at the start, contents are not: that would take as long as reading everything."""
        file = self.files[number]
        return DataError(
            f"{file} is damaged: {what}. Make the copy anew, or copy it again. Which files are whole:  "
            f"{command('data', 'verify', file.parent)}"
        )

    def _open_one(self, number: int) -> _Shard:
        return _Shard.map(self.files[number])

    def numbers(self, rows: Ints) -> Ints:
        found = np.empty(len(rows), np.int64)
        which = np.searchsorted(self.bounds, rows, side="right") - 1
        for number in np.unique(which).tolist():
            here = which == number
            found[here] = self._opened(number).cells[rows[here] - self.bounds[number]]
        return found

    def labels(self) -> tuple[Ints, list[str]] | None:
        if not self.label_names:
            return None
        codes = [self._opened(number).labels for number in range(len(self.files))]
        for number, some in enumerate(codes):
            if len(some) and not -1 <= some.min() <= some.max() < len(self.label_names):
                raise self._damaged(number, "its labels are none of the manifest's")
        return np.concatenate(codes).astype(np.int64), self.label_names


@dataclass(frozen=True)
class _Shard:
    cells: Ints
    labels: NDArray[np.int32]
    starts: NDArray[np.int32]
    genes: NDArray[Any]
    values: NDArray[Any]

    @classmethod
    def map(cls, file: Path) -> _Shard:
        try:
            batch = pa.ipc.open_file(pa.memory_map(str(file))).get_batch(0)
            genes, values = batch.column("genes"), batch.column("values")
            return cls(
                batch.column("cell").to_numpy(),
                batch.column("label").to_numpy(),
                genes.offsets.to_numpy(),
                genes.values.to_numpy(),
                values.values.to_numpy(),
            )
        except (OSError, KeyError, pa.ArrowException) as error:
            raise DataError(
                f"{file} cannot be read: {error}. Which files are whole:  {command('data', 'verify', file.parent)}"
            ) from None

    def read(self, first: int, last: int) -> SparseRows | None:
        """None: the cells lie where nothing is."""
        starts = self.starts[first : last + 1].astype(np.int64)
        begin, end = int(starts[0]), int(starts[-1])
        if begin < 0 or end > len(self.genes) or (np.diff(starts) < 0).any():
            return None
        return SparseRows(starts - begin, self.genes[begin:end], self.values[begin:end])


def _are_cells(rows: SparseRows, genes: int) -> bool:
    """Two looks at what has just been mapped. NaN is not above 0."""
    if not len(rows.genes):
        return True
    return int(rows.genes.max()) < genes and bool(rows.values.min() >= 0) and bool(np.isfinite(rows.values.max()))


def open_shards(folder: Path) -> ShardedCopy:
    """A copy whose files are all there with the sizes that the manifest says."""
    if folder.is_file():
        raise DataError(
            f"{folder} is a file, and source: shards reads a folder. An h5ad file is read with source: local"
        )
    if not folder.is_dir():
        raise DataError(
            f"there is no folder {folder}. With a CONFIG that names h5ad files:  "
            f"{command('data', 'shard', 'CONFIG', '--to', folder)}"
        )
    problems = problems_of(folder, contents=False)
    if problems:
        raise DataError(
            f"{folder} is not a whole sharded copy: {'; '.join(problems[:3])}. Make it anew with --to elsewhere"
        )
    manifest = read_manifest(folder)
    about = manifest["about"]
    if about.get("kind") != KIND:
        raise DataError(f"{folder} does not hold cells but {about.get('kind')!r}")
    check_format(folder, about)
    shards = about["shards"]
    if unlisted := {name for part in ("train", "valid") for name in shards[part]} - manifest["files"].keys():
        raise DataError(f"{folder} is not a whole sharded copy: its manifest does not list {sorted(unlisted)[0]!r:.80}")
    origin = f"sharded copy {manifest['sha256'][:12]}"
    training, validation = (
        ShardFiles(
            [folder / name for name in shards[part]],
            list(shards[part].values()),
            about["labels"],
            origin,
            len(about["genes"]),
        )
        for part in ("train", "valid")
    )
    return ShardedCopy(
        about["genes"],
        about["counts"],
        training,
        validation,
        about["seed"],
        about["made_with"],
        about["values"],
        about["shardwise"],
        about["sources"],
    )


def write_shard(
    file: Path, rows: SparseRows, cells: Ints, labels: NDArray[np.integer], genes: type, values: type
) -> None:
    if rows.starts[-1] >= 2**31:
        raise DataError(
            f"a shard of {len(rows)} cells has {rows.starts[-1]} values, more than fit: use fewer --cells-per-shard"
        )
    batch = arrow_batch(rows, cells, labels, genes, values)
    with pa.ipc.new_file(str(file), batch.schema) as writer:
        writer.write_batch(batch)


def arrow_batch(
    rows: SparseRows, cells: Ints, labels: NDArray[np.integer], genes: type = np.int32, values: type = np.float32
) -> pa.RecordBatch:
    """Cells as Arrow has them, with genes and values in these types."""
    starts = pa.array(rows.starts.astype(np.int32))
    columns = {
        "cell": pa.array(cells),
        "label": pa.array(labels.astype(np.int32)),
        "genes": pa.ListArray.from_arrays(starts, pa.array(rows.genes.astype(genes))),
        "values": pa.ListArray.from_arrays(starts, pa.array(rows.values.astype(values))),
    }
    return pa.RecordBatch.from_pydict(columns)


def rows_in(batch: pa.RecordBatch) -> SparseRows:
    genes, values = batch.column("genes"), batch.column("values")
    return SparseRows(genes.offsets.to_numpy().astype(np.int64), genes.values.to_numpy(), values.values.to_numpy())
