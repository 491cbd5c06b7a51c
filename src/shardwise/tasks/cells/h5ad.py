"""h5ad files and zarr stores as a source of cells: several files, different genes, sparse or dense, read in pieces.

The matrix is read through h5py or zarr alone. anndata reads what is small and has many spellings: names and labels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from anndata.io import read_elem
from numpy.typing import NDArray
from scipy import sparse

from shardwise.errors import DataError
from shardwise.tasks.cells.config import CellsData
from shardwise.tasks.cells.genes import gene_names
from shardwise.tasks.cells.opening import missing_chunks, opened, reading
from shardwise.tasks.cells.rows import Ints, SeveralFiles, SparseRows, stack, starts_of
from shardwise.tasks.cells.scale import Tally

DEFAULT_LABEL = "cell_type"
DENSE_AT_ONCE = 64 * 2**20
"""Bytes of a dense matrix that are read at a time: most of them are zeros, and not kept."""


@dataclass(frozen=True)
class H5adFile:
    """What is known of a file before any cell is read."""

    path: Path
    matrix: str
    """Where the values are: X, a layer, or the X of raw."""
    table: str
    """Where the genes are: var, or that of raw."""
    sparse: bool
    cells: int
    genes: list[str]
    """By column; empty: it has no name, and is left out."""
    gene_column: str = "_index"
    numbered: bool = False
    """Its genes are called 0, 1, 2, … and nobody has asked for that."""
    notes: tuple[str, ...] = ()
    """What a person should know of it."""

    @cached_property
    def gene_set(self) -> frozenset[str]:
        return frozenset(gene for gene in self.genes if gene)


class H5adFiles(SeveralFiles[Any]):
    """A CellSource. Columns become numbers of the vocabulary; genes that it does not have are left out."""

    def __init__(self, files: Sequence[H5adFile], vocabulary: dict[str, int], label_key: str | None = None) -> None:
        super().__init__([file.cells for file in files])
        self.files = files
        self.origin = "h5ad"
        self.label_key = label_key
        self._columns = [np.array([vocabulary.get(gene, -1) for gene in file.genes], np.int32) for file in files]
        self._tallies: list[Tally] = []

    @contextmanager
    def tallied(self) -> Iterator[list[Tally]]:
        """What is read meanwhile is looked at, file by file, as it stands there: all genes, the vocabulary's or not."""
        self._tallies = [Tally(file.path) for file in self.files]
        try:
            yield self._tallies
        finally:
            self._tallies = []

    def numbers(self, rows: Ints) -> Ints:
        return rows

    def labels(self) -> tuple[Ints, list[str]] | None:
        """Numbers over all files; a cell of a file without the column, or without a value in it, has -1."""
        names: dict[str, int] = {}
        codes = np.full(len(self), -1, np.int64)
        for file, start in zip(self.files, self.bounds[:-1], strict=True):
            with reading(file.path) as content:
                column = _label_column(file.path, content, self.label_key)
            if column is not None:
                values, present = column
                numbers = np.array([names.setdefault(value, len(names)) for value in present], np.int64)
                if len(values) != file.cells:
                    raise DataError(
                        f"{file.path}: obs has {len(values)} rows for {file.cells} cells: the file is damaged"
                    )
                codes[start : start + file.cells] = np.where(values >= 0, np.append(numbers, -1)[values], -1)
        return (codes, list(names)) if names else None

    def _read_one(self, number: int, first: int, last: int) -> SparseRows:
        file = self.files[number]
        try:
            rows = self._slice(number, first, last)
        except (OSError, KeyError, ValueError, IndexError, RuntimeError) as error:
            raise DataError(f"{file.path}: the cells {first} to {last - 1} cannot be read: {error}") from None
        rows = _as_fp32(file.path, rows, first)
        if len(rows.genes) and (rows.genes.min() < 0 or rows.genes.max() >= len(file.genes)):
            raise DataError(
                f"{file.path}: the cells {first} to {last - 1} name columns that {file.matrix} does not have: the file is "
                "damaged. Copy it again"
            )
        if file.sparse:
            _check_no_gene_twice(file, rows, first)
        rows = _kept(rows, rows.values != 0)
        if self._tallies:
            self._tallies[number].add(rows, first)
        genes = self._columns[number][rows.genes]
        return _kept(SparseRows(rows.starts, genes, rows.values), genes >= 0)

    def _slice(self, number: int, first: int, last: int) -> SparseRows:
        matrix = self._opened(number)
        if self.files[number].sparse:
            pointers = matrix["indptr"][first : last + 1].astype(np.int64)
            begin, end = int(pointers[0]), int(pointers[-1])
            if (np.diff(pointers) < 0).any() or matrix["data"].shape[0] < end:
                raise ValueError("its row pointers lead outside the file")
            return SparseRows(pointers - begin, matrix["indices"][begin:end], matrix["data"][begin:end])
        rows_at_once = max(1, DENSE_AT_ONCE // max(1, matrix.shape[1] * matrix.dtype.itemsize))
        parts = [_sparse(matrix[a : min(a + rows_at_once, last)]) for a in range(first, last, rows_at_once)]
        return parts[0] if len(parts) == 1 else stack(parts)

    def _open_one(self, number: int) -> Any:
        file = self.files[number]
        return opened(file.path)[file.matrix]


def inspect(path: Path, options: CellsData) -> H5adFile:
    """Look at a file; a DataError says what is wrong with it."""
    try:
        return _inspected(path, options)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise DataError(
            f"{path} is damaged or of a kind that cannot be read ({type(error).__name__}: {error}). A file of an old anndata is "
            "brought up to date by reading and writing it: anndata.read_h5ad(…).write_h5ad(…)"
        ) from None


def _inspected(path: Path, options: CellsData) -> H5adFile:
    with reading(path) as content:
        name, table = _place_of(path, content, options.layer)
        matrix = content[name]
        is_array = hasattr(matrix, "shape")
        kind = str(matrix.attrs.get("encoding-type", "array" if is_array else "?"))
        if kind == "csc_matrix":
            raise DataError(
                f"{path}: {name} is stored by gene (CSC), and cells cannot be read from it. Store it by cell: {_by_cell(name)}"
            )
        if kind not in ("csr_matrix", "array"):
            raise DataError(
                f"{path}: {name} is stored as {kind}; csr_matrix and array can be read. A file of an old anndata is brought up "
                "to date by reading and writing it: anndata.read_h5ad(…).write_h5ad(…)"
            )
        sparse = kind == "csr_matrix"
        values = matrix["data"] if sparse else matrix
        if values.dtype.kind not in "fiub":
            raise DataError(f"{path}: {name} holds {values.dtype}, not numbers that could be counts")
        cells, columns = (int(size) for size in (matrix.attrs["shape"] if sparse else matrix.shape))
        if table not in content:
            raise DataError(f"{path} has no {table}, the table of genes of {name}: the file is damaged. Copy it again")
        genes = gene_names(path, content, table, options.gene_key)
        sizes = [matrix[part].shape[0] for part in ("indptr", "indices", "data")] if sparse else []
        if sparse and (sizes[0] != cells + 1 or sizes[1] != sizes[2]):
            raise DataError(f"{path}: the parts of {name} do not fit together: the file is damaged. Copy it again")
        notes = [*genes.notes, *_check_chunks(path, matrix, columns)]
    if len(genes.names) != columns:
        raise DataError(f"{path}: {name} has {columns} columns, but {table} names {len(genes.names)} genes")
    if not cells:
        raise DataError(f"{path} has no cells")
    if not columns:
        raise DataError(f"{path} has no genes")
    return H5adFile(
        path, name, table, sparse, cells, genes.names, genes.column, genes.numbers, tuple(notes)
    )  # fmt: skip


def _place_of(path: Path, content: Any, layer: str | None) -> tuple[str, str]:
    """Where the values are, and the table of their genes: those of raw are others than those of X."""
    has_raw = "raw" in content and "X" in content["raw"]
    layers = list(content["layers"]) if "layers" in content else []
    if layer == "raw" and has_raw and "raw" in layers:
        raise DataError(
            f"{path} has both adata.raw and a layer that is called raw: say which as data.layer: raw/X or layers/raw"
        )
    if layer in (None, "X") and layer not in layers:
        if "X" in content and content["X"].attrs.get("encoding-type") != "null":
            return "X", "var"
    elif layer in layers:
        return f"layers/{layer}", "var"
    elif layer in ("raw", "raw/X") and has_raw:
        return "raw/X", "raw/var"
    elif layer is not None and layer.startswith("layers/") and layer.removeprefix("layers/") in layers:
        return layer, "var"
    listed = ", ".join(layers) or "none"
    raw = "; raw (adata.raw) is there as well" if has_raw else ""
    asked = "X" if layer in (None, "X") else f"layers/{layer}"
    if layer in ("raw", "raw/X"):
        asked = "adata.raw, and it has no layers/raw"
    raise DataError(f"{path} has no {asked}. Layers in it: {listed}{raw}. Set data.layer accordingly")


def _by_cell(name: str) -> str:
    if name == "raw/X":
        return "raw = adata.raw.to_adata(); raw.X = raw.X.tocsr(); raw.write_h5ad(…), and read its X"
    return f"{_in_python(name)} = {_in_python(name)}.tocsr(); adata.write_h5ad(…)"


def _in_python(name: str) -> str:
    if name.startswith("layers/"):
        return f"adata.layers[{name.removeprefix('layers/')!r}]"
    return "adata.raw.X" if name == "raw/X" else "adata.X"


def _check_chunks(path: Path, matrix: Any, columns: int) -> list[str]:
    """What a sparse matrix has stored is not zeros. A dense one may be without chunks that are: that is told."""
    if hasattr(matrix, "shape"):
        missing = missing_chunks(matrix)
        return (
            [
                f"{path}: {missing}, and are read as zeros. zarr leaves out chunks that are all zeros; if there should be "
                "values, the store is not whole: copy it again"
            ]
            if missing
            else []
        )
    # Of a matrix of one column, all indices are 0.
    for part in ("data", "indptr", *(("indices",) if columns > 1 else ())):
        missing = missing_chunks(matrix[part]) if matrix["data"].shape[0] else None
        if missing:
            raise DataError(f"{path}: {missing}, and would be read as zeros: the store is not whole. Copy it again")
    return []


def _label_column(path: Path, content: Any, key: str | None) -> tuple[Ints, list[str]] | None:
    """Codes into the names that occur; -1 where there is no value."""
    obs = content.get("obs", {})
    name = key or DEFAULT_LABEL
    if name not in obs:
        if key is None:
            return None
        raise DataError(f"{path}: obs has no column {key!r}. It has: {', '.join(obs)}. Set data.label_key accordingly")
    import pandas

    try:
        column = pandas.Categorical(read_elem(obs[name]))
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path}: the column {name!r} of obs cannot be read: {error}") from None
    return np.asarray(column.codes, np.int64), [str(value) for value in column.categories]


def _kept(rows: SparseRows, which: NDArray[Any]) -> SparseRows:
    if which.all():
        return rows
    kept_before = starts_of(which)
    return SparseRows(kept_before[rows.starts], rows.genes[which], rows.values[which])


def _sparse(dense: NDArray[Any]) -> SparseRows:
    rows, genes = np.nonzero(dense)
    return SparseRows(starts_of(np.bincount(rows, minlength=len(dense))), genes, dense[rows, genes])


def _as_fp32(path: Path, rows: SparseRows, first: int) -> SparseRows:
    """Values as they are trained on. One that is no expression is an error."""
    with np.errstate(over="ignore"):
        values: NDArray[Any] = rows.values.astype(np.float32, copy=False)
    wrong = ~np.isfinite(values)
    what = "a value that is no number (NaN or infinite)"
    if wrong.any():
        found = rows.values[int(np.flatnonzero(wrong)[0])]
        if np.isfinite(found):
            what += f" in fp32: {found:g} is too large"
    elif len(values) and values.min() < 0:
        wrong = values < 0
        what = f"a negative value ({values.min():g}), so these are not counts or log-normalised counts"
    if wrong.any():
        cell = first + int(np.searchsorted(rows.starts, int(np.flatnonzero(wrong)[0]), side="right")) - 1
        raise DataError(f"{path}: cell {cell} has {what}. Take such cells out, or choose another layer with data.layer")
    return SparseRows(rows.starts, rows.genes, values)


def _check_no_gene_twice(file: H5adFile, rows: SparseRows, first: int) -> None:
    """Two values of one gene would be taken as two genes. CSR allows it, to mean their sum."""
    # Nearly every file has its columns in ascending order: then nothing stands twice, and one comparison tells.
    back = rows.genes[1:] <= rows.genes[:-1]
    inner = rows.starts[(rows.starts > 0) & (rows.starts < len(rows.genes))]
    back[inner - 1] = False  # from one cell to the next
    if not back.any():
        return
    # A sum of matrices adds up what stands twice: cells that become shorter had something so.
    shape, ones = (len(rows), len(file.genes)), np.ones(len(rows.genes), np.int8)
    summed = sparse.csr_array((ones, rows.genes, rows.starts), shape=shape) + sparse.csr_array(shape, dtype=np.int8)
    shorter = np.flatnonzero(np.diff(summed.indptr) < rows.lengths)
    if len(shorter):
        cell = int(shorter[0])
        genes, times = np.unique(rows.genes[rows.starts[cell] : rows.starts[cell + 1]], return_counts=True)
        twice = file.genes[int(genes[times > 1][0])]
        raise DataError(
            f"{file.path}: cell {first + cell} has two values of the gene {twice!r} in {file.matrix}. Add such values "
            f"up: {_in_python(file.matrix)}.sum_duplicates(); adata.write_h5ad(…)"
        )
