"""What a file is that is neither h5ad nor zarr, and the line that makes an h5ad file of it."""

from __future__ import annotations

import gzip
import zipfile
from pathlib import Path
from typing import Any

import h5py

HDF5 = b"\x89HDF\r\n\x1a\n"
MATRIX_MARKET = b"%%MatrixMarket"

_ARCHIVES = [
    (b"PK\x03\x04", "a zip archive", "unzip"),
    (b"BZh", "compressed with bzip2", "bunzip2 -k"),
    (b"\xfd7zXZ\x00", "compressed with xz", "unxz -k"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd", "unzstd"),
]
_TEXT = {".csv": ",", ".tsv": "\t", ".tab": "\t", ".txt": "\t"}


def what_file(path: Path) -> str | None:
    """A file that is not HDF5 at all; None: it begins like HDF5, or nothing is known of it."""
    with path.open("rb") as stream:
        start = stream.read(512)
    if not start:
        return "is empty (0 bytes): it was never written, or its copy was broken off. Copy it again"
    if start.startswith(HDF5):
        return None
    inner, name = start, path.name.lower()
    if start.startswith(b"\x1f\x8b"):
        inner, name = _unzipped_start(path), name.removesuffix(".gz")
        if inner.startswith(HDF5):
            return f"is compressed with gzip, and cannot be read in pieces. Unpack it: gunzip -k {path}"
        if name.endswith((".tar", ".tgz")):
            return f"is a tar archive. Unpack it (tar xzf {path}) and name what is in it"
    elif (arrays := _arrays_in(path)) or start.startswith(b"\x93NUMPY"):
        return _of_arrays(path, arrays)
    elif packed := next(((what, how) for magic, what, how in _ARCHIVES if start.startswith(magic)), None):
        what, how = packed
        return f"is {what}, and cannot be read in pieces. Unpack it ({how} {path}) and name what was in it"
    elif start[257:262] == b"ustar":
        return f"is a tar archive. Unpack it (tar xf {path}) and name what is in it"
    return _by_name_and_text(path, name, inner)


def _arrays_in(path: Path) -> list[str]:
    """Their names, in a zip archive that holds nothing else."""
    try:
        held = zipfile.ZipFile(path).namelist()
    except zipfile.BadZipFile:
        return []
    return [name.removesuffix(".npy") for name in held] if all(name.endswith(".npy") for name in held) else []


def _of_arrays(path: Path, held: list[str]) -> str:
    """What numpy.save, numpy.savez and scipy.sparse.save_npz write."""
    out = path.with_suffix(".h5ad") if path.suffix != ".h5ad" else path.with_suffix(".new.h5ad")
    read, what, package = f"numpy.load({str(path)!r})", "an array of NumPy (npy)", "anndata, numpy"
    if {"format", "shape"} <= set(held):
        read, package = f"scipy.sparse.load_npz({str(path)!r}).tocsr()", "anndata, scipy.sparse"
        what = "a sparse matrix of SciPy (npz)"
    elif held:
        read, what = f"{read}[{held[0]!r}]", f"a file of arrays of NumPy (npz: {', '.join(held[:5])})"
    return (
        f"is {what}, without the names of genes and cells. Convert it: {_python(f'anndata.AnnData({read})', out, package)} (with "
        ".T where genes are its rows), and set obs_names and var_names"
    )


def _by_name_and_text(path: Path, name: str, start: bytes) -> str:
    out = path.with_suffix("").with_suffix(".h5ad") if path.suffix == ".gz" else path.with_suffix(".h5ad")
    if out == path:
        out = path.with_suffix(".new.h5ad")
    if start.startswith(MATRIX_MARKET) or name.endswith(".mtx"):
        return (
            f"is a matrix in Matrix Market format (mtx), without the names of genes and cells. {_from_mtx(path, out)}"
        )
    if name.endswith((".rds", ".rdata", ".qs", ".robj")):
        made = out.name
        return (
            f"is a file of R. Convert it in R: zellkonverter::writeH5AD(Seurat::as.SingleCellExperiment(readRDS('{path}')), "
            f"'{made}'), without as.SingleCellExperiment where it is one already"
        )
    if b"<html" in start.lower() or start.lstrip().lower().startswith(b"<!doctype"):
        return "is a web page, not data: a download was answered with a page (of an error, or of a login). Download it again"
    if start.startswith(b"version https://git-lfs"):
        return "is a pointer of Git LFS, not the data itself. Fetch the data: git lfs pull"
    if start.startswith(b"PAR1") or name.endswith((".parquet", ".feather", ".arrow")):
        read = f"anndata.AnnData(pandas.read_parquet({str(path)!r}))"
        return (
            f"is a table ({path.suffix.lstrip('.')}). Convert it: {_python(read, out, 'anndata, pandas')} (a row per cell, a "
            "column per gene)"
        )
    ending = next((ending for ending in _TEXT if name.endswith(ending)), None)
    if ending:
        delimiter = _TEXT[ending] if b"," not in start or b"\t" in start else ","
        read = f"anndata.io.read_csv({str(path)!r}, delimiter={delimiter!r})"
        return (
            f"is a table of text ({ending.lstrip('.')}). Convert it: {_python(read, out)} (with .T before .write_h5ad where "
            "genes are its rows)"
        )
    return "cannot be opened as h5ad: it does not begin like an HDF5 file. Is it what data.paths should name?"


def what_hdf5(path: Path, content: h5py.File) -> str:
    """An HDF5 file that is no h5ad file."""
    out = path.with_suffix(".h5ad") if path.suffix != ".h5ad" else path.with_suffix(".new.h5ad")
    old = [
        name for name, part in content.items() if isinstance(part, h5py.Group) and {"barcodes", "genes"} <= set(part)
    ]
    if old or ("matrix" in content and "barcodes" in _names(content["matrix"])):
        read = f"scanpy.read_10x_h5({str(path)!r})"
        return (
            "is a matrix of 10x Cell Ranger (h5), not h5ad. Convert it: "
            f'python -c "import scanpy; a = {read}; a.var_names_make_unique(); a.write_h5ad({str(out)!r})"'
        )
    if "matrix" in content and "row_attrs" in content:
        read = f"anndata.io.read_loom({str(path)!r})"
        return f"is a loom file. Convert it (pip install loompy): {_python(read, out)}"
    if "mod" in content:
        kinds = ", ".join(content["mod"])
        one = "rna" if "rna" in content["mod"] else next(iter(content["mod"]), "rna")
        read = f"mudata.read_h5mu({str(path)!r}).mod[{one!r}]"
        return f"is a file of several modalities (MuData: {kinds}). Write out the one to train on: {_python(read, out, 'mudata')}"
    if "assays" in content or "cell.names" in content:
        return f"is a file of Seurat (h5Seurat). Convert it in R: SeuratDisk::Convert('{path}', dest = 'h5ad')"
    held = ", ".join(sorted(content)[:5]) or "nothing"
    return f"has no var, the table of genes: it is not an h5ad file. It holds {held}"


def what_folder(path: Path) -> str:
    """A folder that is no zarr store."""
    names = sorted(each.name for each in path.iterdir())
    matrix = next((name for name in names if name in ("matrix.mtx", "matrix.mtx.gz")), None)
    if matrix:
        read = f"scanpy.read_10x_mtx({str(path)!r})"
        return f"is a folder of 10x Cell Ranger (mtx). Convert it: {_python(read, path.with_suffix('.h5ad'), 'scanpy')}"
    if "manifest.json" in names:
        return "is a folder that `shardwise data shard` may have written: those are read with data.source: shards"
    files = [name for name in names if name.endswith((".h5ad", ".zarr"))]
    if files:
        return f"is a folder, and data.paths names files. In it: {', '.join(files[:5])}. List them one by one"
    if path.suffix == ".zarr":
        return "is not a whole zarr store: it has neither zarr.json nor .zgroup. Copy it again"
    return "is a folder, and neither a zarr store nor one with h5ad files. Check data.paths"


def _from_mtx(path: Path, out: Path) -> str:
    names = {each.name for each in path.parent.iterdir()}
    if any(name.startswith("barcodes.tsv") for name in names) and path.name in ("matrix.mtx", "matrix.mtx.gz"):
        return f"Convert its folder: {_python(f'scanpy.read_10x_mtx({str(path.parent)!r})', out, 'scanpy')}"
    return (
        f"Convert it: {_python(f'anndata.io.read_mtx({str(path)!r}).T', out)} (.T where genes are its rows, as Cell Ranger "
        "writes them), and set obs_names and var_names from its tables"
    )


def _python(read: str, out: Path, package: str = "anndata") -> str:
    return f'python -c "import {package}; {read}.write_h5ad({str(out)!r})"'


def _unzipped_start(path: Path) -> bytes:
    try:
        with gzip.open(path) as stream:
            return stream.read(512)
    except (OSError, EOFError):
        return b""


def _names(part: Any) -> set[str]:
    return set(part) if isinstance(part, h5py.Group) else set()
