"""h5ad files as a source of cells: several files, different genes, sparse or dense, read in pieces.

The matrix is read through h5py alone. anndata reads what is small and has many spellings: names and labels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from anndata.io import read_elem
from numpy.typing import NDArray
from scipy import sparse

from shardwise.errors import DataError
from shardwise.tasks.cells.config import CellsData
from shardwise.tasks.cells.rows import Ints, SeveralFiles, SparseRows, starts_of

DEFAULT_LABEL = "cell_type"


@dataclass(frozen=True)
class H5adFile:
    """What is known of a file before any cell is read."""

    path: Path
    matrix: str
    """Where the values are: X or a layer."""
    sparse: bool
    cells: int
    genes: list[str]


class H5adFiles(SeveralFiles[Any]):
    """A CellSource. Columns become numbers of the vocabulary; genes that it does not have are left out."""

    def __init__(self, files: Sequence[H5adFile], vocabulary: dict[str, int], label_key: str | None = None) -> None:
        super().__init__([file.cells for file in files])
        self.files = files
        self.origin = "h5ad"
        self.label_key = label_key
        self._columns = [np.array([vocabulary.get(gene, -1) for gene in file.genes], np.int32) for file in files]

    def numbers(self, rows: Ints) -> Ints:
        return rows

    def labels(self) -> tuple[Ints, list[str]] | None:
        """Numbers over all files; a cell of a file without the column, or without a value in it, has -1."""
        names: dict[str, int] = {}
        codes = np.full(len(self), -1, np.int64)
        for file, start in zip(self.files, self.bounds[:-1], strict=True):
            with _opened(file.path) as content:
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
        except (OSError, KeyError, ValueError) as error:
            raise DataError(f"{file.path}: the cells {first} to {last - 1} cannot be read: {error}") from None
        # What is trained on is fp32: a number too large for that is none.
        rows = SparseRows(rows.starts, rows.genes, rows.values.astype(np.float32, copy=False))
        _check_values(file.path, rows, first)
        if len(rows.genes) and (rows.genes.min() < 0 or rows.genes.max() >= len(file.genes)):
            raise DataError(
                f"{file.path}: the cells {first} to {last - 1} name columns that {file.matrix} does not have: the file is "
                "damaged. Copy it again"
            )
        if file.sparse:
            _check_no_gene_twice(file, rows, first)
        genes = self._columns[number][rows.genes]
        keep = (genes >= 0) & (rows.values != 0)
        if keep.all():
            return SparseRows(rows.starts, genes, rows.values)
        kept_before = starts_of(keep)
        return SparseRows(kept_before[rows.starts], genes[keep], rows.values[keep])

    def _slice(self, number: int, first: int, last: int) -> SparseRows:
        matrix = self._opened(number)
        if self.files[number].sparse:
            pointers = matrix["indptr"][first : last + 1].astype(np.int64)
            begin, end = int(pointers[0]), int(pointers[-1])
            if (np.diff(pointers) < 0).any() or len(matrix["data"]) < end:
                raise ValueError("its row pointers lead outside the file")
            return SparseRows(pointers - begin, matrix["indices"][begin:end], matrix["data"][begin:end])
        dense = matrix[first:last]
        rows, genes = np.nonzero(dense)
        return SparseRows(starts_of(np.bincount(rows, minlength=last - first)), genes, dense[rows, genes])

    def _open_one(self, number: int) -> Any:
        file = self.files[number]
        return _opened(file.path)[file.matrix]


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
    with _opened(path) as content:
        name = f"layers/{options.layer}" if options.layer else "X"
        if name not in content:
            layers = ", ".join(content.get("layers", {})) or "none"
            raise DataError(f"{path} has no {name}. Layers in it: {layers}. Set data.layer accordingly")
        matrix = content[name]
        kind = str(matrix.attrs.get("encoding-type", "array" if isinstance(matrix, h5py.Dataset) else "?"))
        if kind == "csc_matrix":
            raise DataError(
                f"{path}: {name} is stored by gene (CSC), and cells cannot be read from it. Store it by cell: "
                "adata.X = adata.X.tocsr(); adata.write_h5ad(…)"
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
        genes = _gene_names(path, content, options.gene_key)
        if sparse and (len(matrix["indptr"]) != cells + 1 or len(matrix["indices"]) != len(matrix["data"])):
            raise DataError(f"{path}: the parts of {name} do not fit together: the file is damaged. Copy it again")
    if len(genes) != columns:
        raise DataError(f"{path}: {name} has {columns} columns, but var names {len(genes)} genes")
    if not cells:
        raise DataError(f"{path} has no cells")
    return H5adFile(path, name, sparse, cells, genes)


def pieces_to_check(cells: int, piece: int = 4096, at_most: int = 256) -> Iterator[tuple[int, int]]:
    """Ranges of rows that cover everything, or, in a huge file, are spread evenly over it."""
    starts = np.arange(0, cells, piece)
    if len(starts) > at_most:
        starts = starts[np.linspace(0, len(starts) - 1, at_most).astype(int)]
    for start in starts.tolist():
        yield start, min(start + piece, cells)


def _opened(path: Path) -> h5py.File:
    if not path.is_file():
        near = sorted(other.name for other in path.parent.glob("*.h5ad")) if path.parent.is_dir() else []
        hint = f" In that folder: {', '.join(near[:5])}." if near else ""
        raise DataError(f"there is no file {path}.{hint} Check data.paths")
    try:
        return h5py.File(path, "r")
    except OSError as error:
        raise DataError(
            f"{path} cannot be opened as h5ad ({error}). Is it complete? A copy that was cut off looks like this"
        ) from None


def _gene_names(path: Path, content: h5py.File, key: str | None) -> list[str]:
    if "var" not in content:
        raise DataError(f"{path} has no var, the table of genes: it is not an h5ad file")
    var = content["var"]
    column = key or str(var.attrs.get("_index", "_index"))
    if column not in var:
        raise DataError(
            f"{path}: var has no column {column!r}. It has: {', '.join(var)}. Set data.gene_key accordingly"
        )
    genes = [str(gene) for gene in np.asarray(read_elem(var[column]))]
    if len(set(genes)) < len(genes):
        seen: set[str] = set()
        twice = next(gene for gene in genes if gene in seen or seen.add(gene))  # type: ignore[func-returns-value]
        raise DataError(
            f"{path}: {len(genes) - len(set(genes))} gene names occur more than once, for example {twice!r}. Make them "
            "unique (adata.var_names_make_unique()), or choose another column with data.gene_key"
        )
    return genes


def _label_column(path: Path, content: h5py.File, key: str | None) -> tuple[Ints, list[str]] | None:
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


def _check_values(path: Path, rows: SparseRows, first: int) -> None:
    values: NDArray[Any] = rows.values
    wrong = ~np.isfinite(values)
    what = "a value that is no number (NaN or infinite)"
    if not wrong.any() and len(values) and values.min() < 0:
        wrong, what = (
            values < 0,
            f"a negative value ({values.min():g}), so these are not counts or log-normalised counts",
        )
    if wrong.any():
        cell = first + int(np.searchsorted(rows.starts, int(np.flatnonzero(wrong)[0]), side="right")) - 1
        raise DataError(f"{path}: cell {cell} has {what}. Take such cells out, or choose another layer with data.layer")


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
        matrix = f"adata.layers[{file.matrix.removeprefix('layers/')!r}]" if file.matrix != "X" else "adata.X"
        raise DataError(
            f"{file.path}: cell {first + cell} has two values of the gene {twice!r} in {file.matrix}. Add such values "
            f"up: {matrix}.sum_duplicates(); adata.write_h5ad(…)"
        )
