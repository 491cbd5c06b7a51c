"""Zarr stores, adata.raw, layers; and what is said of files that are none of these, or that somebody else holds."""

from __future__ import annotations

import bz2
import fcntl
import functools
import gzip
import logging
import lzma
import os
import zipfile
from importlib import util
from pathlib import Path
from typing import Any

import anndata
import h5py
import numpy as np
import pandas as pd
import pytest
from scipy import sparse

from shardwise.errors import DataError, MissingExtra
from shardwise.tasks.cells import h5ad, opening
from shardwise.tasks.cells.rows import gather
from shardwise.tasks.cells.sharding import shard_cells
from shardwise.tasks.cells.shards import open_shards
from shardwise.tasks.cells.task import CellsTask
from tests.cells_task.files import random_counts, write_cells
from tests.cells_task.test_h5ad import config_for, corpus_of, dense
from tests.cells_task.test_scale import logged
from tests.distributed import work
from tests.distributed.pool import RankPool

COUNTS = random_counts(60, 12) + (np.arange(12) == 0)
"""Every cell has a gene."""


def adata(counts: Any = COUNTS, *, of: Any = sparse.csr_matrix, **parts: Any) -> Any:
    cells, genes = counts.shape
    index = [
        pd.Index([f"{kind}{i}" for i in range(size)], dtype=object) for kind, size in (("c", cells), ("gene", genes))
    ]
    data = anndata.AnnData(
        of(counts.astype(np.float32)), obs=pd.DataFrame(index=index[0]), var=pd.DataFrame(index=index[1])
    )
    for name, value in parts.items():
        setattr(data, name, value)
    return data


def written(path: Path, data: Any) -> Path:
    data.write_zarr(path) if path.suffix == ".zarr" else data.write_h5ad(path)
    return path


# ---------------------------------------------------------------- zarr


@pytest.mark.parametrize("of", [sparse.csr_matrix, np.asarray])
@pytest.mark.parametrize("version", [2, 3])
def test_a_zarr_store_is_read_as_the_h5ad_file_is(tmp_path: Path, of: Any, version: int) -> None:
    data = adata(of=of)
    data.obs["cell_type"] = pd.Categorical(["T", "B", "NK"] * 20)
    with anndata.settings.override(zarr_write_format=version):
        store = written(tmp_path / "a.zarr", data)
    file = written(tmp_path / "a.h5ad", data)
    corpora = [corpus_of(path) for path in (store, file)]
    for corpus in corpora:
        assert (dense(corpus.training, 12) == COUNTS).all()
        assert (dense(corpus.training, 12, 13, 29) == COUNTS[13:29]).all()
        some = np.array([0, 3, 4, 30, 59])
        assert gather(corpus.training, some, gap=2).lengths.tolist() == (COUNTS[some] > 0).sum(axis=1).tolist()
    assert corpora[0].training.labels()[1] == ["B", "NK", "T"]
    assert (corpora[0].training.labels()[0] == corpora[1].training.labels()[0]).all()
    assert corpora[0].genes == corpora[1].genes and corpora[0].held_out.tolist() == corpora[1].held_out.tolist()


@pytest.mark.parametrize("streaming", ["true", "false"])
def test_ranks_and_workers_train_from_a_zarr_store_as_from_h5ad(
    ranks: RankPool, tmp_path: Path, streaming: str
) -> None:
    """Zarr reads in a thread of its own, which a worker that is forked does not inherit."""
    losses = []
    for name in ("a.zarr", "a.h5ad"):
        path = written(tmp_path / name, adata())
        text = f"""
task: cells
data: {{source: local, paths: [{path}], streaming: {streaming}, streaming_chunk_size: 8, streaming_shuffle_buffer: 24,
  num_workers: 1}}
model: {{hidden_dim: 16, num_layers: 1, num_heads: 2}}
training: {{max_steps: 4, batch_size: 5}}
"""
        results = ranks.run(2, functools.partial(work.train, evaluate=True), text, [])
        losses.append([results[0]["losses"], results[0]["metrics"]])
    assert losses[0][0] == losses[1][0] and losses[0][1] == losses[1][1]


def test_a_zarr_store_can_be_sharded(tmp_path: Path) -> None:
    path = written(tmp_path / "a.zarr", adata())
    copy = open_shards(shard_cells(config_for(path).data, 0, tmp_path / "copy", cells_per_shard=30))
    numbers = copy.training.numbers(np.arange(len(copy.training)))
    assert (dense(copy.training, 12) == COUNTS[numbers]).all()


def test_without_zarr_the_package_to_install_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "a.zarr", adata())
    monkeypatch.setattr(opening, "find_spec", lambda name: None if name == "zarr" else util.find_spec(name))
    with pytest.raises(MissingExtra, match=r"a.zarr needs the package 'zarr': pip install 'shardwise\[cells\]'"):
        corpus_of(path)


def test_a_zarr_store_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    """Zarr itself takes a chunk that is not there for zeros."""
    lost = written(tmp_path / "a.zarr", adata())
    for chunk in (lost / "X" / "data").iterdir():
        if not chunk.name.startswith(".z") and chunk.name != "zarr.json":
            chunk.unlink() if chunk.is_file() else [each.unlink() for each in chunk.rglob("*") if each.is_file()]
    with pytest.raises(DataError, match=r"a.zarr: 1 of the 1 chunks of X/data are missing, and would be read as zeros"):
        corpus_of(lost)
    pointers = written(tmp_path / "b.zarr", adata())
    (chunk,) = [each for each in (pointers / "X" / "indptr").rglob("*") if each.is_file() and each.name in ("0", "c0")]
    chunk.unlink()
    with pytest.raises(DataError, match=r"b.zarr"):
        CellsTask(config_for(pointers)).prepare_data()
    (tmp_path / "c.zarr").mkdir()
    with pytest.raises(DataError, match=r"c.zarr is not a whole zarr store: it has neither zarr.json nor .zgroup"):
        corpus_of(tmp_path / "c.zarr")
    import zarr

    zarr.open_group(str(tmp_path / "d.zarr"), mode="w").create_group("images")
    with pytest.raises(DataError, match=r"d.zarr is a zarr store, but not of cells: it has no var. It holds images"):
        corpus_of(tmp_path / "d.zarr")


def _chunks(array: Path) -> list[Path]:
    return sorted(
        file for file in array.rglob("*") if file.is_file() and file.name not in (".zarray", ".zattrs", "zarr.json")
    )


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("part", ["X/indices", "X/indptr", "X/data", "var/_index", "var/symbol/categories"])
def test_a_part_of_a_zarr_store_without_its_chunks_is_named(tmp_path: Path, part: str, version: int) -> None:
    data = adata()
    data.var["symbol"] = pd.Categorical([f"S{i}" for i in range(12)])
    with anndata.settings.override(zarr_write_format=version):
        store = written(tmp_path / "a.zarr", data)
    for chunk in _chunks(store / part):
        chunk.unlink()
    with pytest.raises(
        DataError, match=rf"a.zarr: 1 of the 1 chunks of {part} are missing, and .* whole. Copy it again$"
    ):
        corpus_of(store, **({"gene_key": "symbol"} if "symbol" in part else {}))


@pytest.mark.parametrize("version", [2, 3])
def test_chunks_of_a_dense_zarr_matrix_that_are_not_there_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, version: int
) -> None:
    """Those that are all zeros are left out by zarr itself, so that they are no error."""
    with anndata.settings.override(zarr_write_format=version):
        adata(of=np.asarray).write_zarr(tmp_path / "a.zarr", chunks=(20, 12))
    said = []
    for lost in (0, 1):
        for chunk in _chunks(tmp_path / "a.zarr" / "X")[:lost]:
            chunk.unlink()
        caplog.clear()
        CellsTask(config_for(tmp_path / "a.zarr")).prepare_data()
        said.append([record.getMessage() for record in caplog.records if "chunks of X" in record.getMessage()])
    assert said[0] == [] and len(said[1]) == 1
    assert f"{tmp_path / 'a.zarr'}: 1 of the 3 chunks of X are missing, and are read as zeros" in said[1][0]


def test_a_matrix_whose_indices_are_all_zero_is_whole(tmp_path: Path) -> None:
    path = written(tmp_path / "a.zarr", adata(COUNTS[:, :1]))
    assert (dense(corpus_of(path).training, 1) == COUNTS[:, :1]).all()
    written(tmp_path / "b.zarr", adata(0 * COUNTS))
    corpus_of(tmp_path / "b.zarr")


# ---------------------------------------------------------------- layers and raw


@pytest.mark.parametrize("ending", ["h5ad", "zarr"])
@pytest.mark.parametrize("of", [sparse.csr_matrix, np.asarray])
def test_raw_has_genes_of_its_own(tmp_path: Path, ending: str, of: Any) -> None:
    data = adata(logged(COUNTS)[:, [7, 2, 5]], of=of)
    data.var_names = ["gene7", "gene2", "gene5"]
    data.raw = adata(of=of)
    path = written(tmp_path / f"a.{ending}", data)
    raw, shown = corpus_of(path, layer="raw"), corpus_of(path)
    assert raw.counts and list(raw.genes) == [f"gene{i}" for i in range(12)]
    assert (dense(raw.training, 12) == COUNTS).all()
    assert not shown.counts and list(shown.genes) == ["gene7", "gene2", "gene5"]


def test_a_layer_that_is_called_raw_is_read_and_two_of_that_name_are_refused(tmp_path: Path) -> None:
    data = adata(logged(COUNTS))
    data.layers["raw"] = sparse.csr_matrix(COUNTS.astype(np.float32))
    path = written(tmp_path / "a.h5ad", data)
    assert corpus_of(path, layer="raw").counts and corpus_of(path, layer="layers/raw").counts
    data.raw = adata(2 * COUNTS)
    both = written(tmp_path / "b.h5ad", data)
    with pytest.raises(
        DataError, match=r"both adata.raw and a layer that is called raw: say which as data.layer: raw/X or lay"
    ):
        corpus_of(both, layer="raw")
    assert (dense(corpus_of(both, layer="raw/X").training, 12) == 2 * COUNTS).all()
    assert (dense(corpus_of(both, layer="layers/raw").training, 12) == COUNTS).all()


def test_a_layer_that_is_not_there_is_answered_with_those_that_are_and_with_raw(tmp_path: Path) -> None:
    data = adata(logged(COUNTS), layers={"counts": sparse.csr_matrix(COUNTS), "spliced": sparse.csr_matrix(COUNTS)})
    data.raw = adata()
    path = written(tmp_path / "a.h5ad", data)
    with pytest.raises(
        DataError, match=r"a.h5ad has no layers/count. Layers in it: counts, spliced; raw \(adata.raw\) is"
    ):
        corpus_of(path, layer="count")
    assert not corpus_of(path, layer="X").counts


def test_a_file_with_layers_and_without_x(tmp_path: Path) -> None:
    data = adata(layers={"counts": sparse.csr_matrix(COUNTS)})
    data.X = None
    path = written(tmp_path / "a.h5ad", data)
    with pytest.raises(DataError, match=r"has no X. Layers in it: counts. Set data.layer accordingly"):
        corpus_of(path)
    assert (dense(corpus_of(path, layer="counts").training, 12) == COUNTS).all()


@pytest.mark.parametrize(
    ("layer", "advice"),
    [(None, "adata.X = adata.X.tocsr(); "), ("counts", "adata.layers['counts'] = adata.layers['counts'].tocsr(); ")],
)
def test_a_matrix_stored_by_gene_is_told_how_to_mend(tmp_path: Path, layer: str | None, advice: str) -> None:
    by_gene = sparse.csc_matrix(COUNTS.astype(np.float32))
    data = adata(layers={"counts": by_gene})
    data.X = by_gene
    path, options = written(tmp_path / "a.h5ad", data), {} if layer is None else {"layer": layer}
    with pytest.raises(DataError) as refused:
        corpus_of(path, **options)
    assert advice in str(refused.value)
    exec(advice, {"adata": data})
    assert (dense(corpus_of(written(path, data), **options).training, 12) == COUNTS).all()


def test_a_wide_dense_matrix_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(h5ad, "DENSE_AT_ONCE", 7 * 12 * 4)
    path = write_cells(tmp_path / "a.h5ad", COUNTS, dense=True)
    assert (dense(corpus_of(path).training, 12) == COUNTS).all()


@pytest.mark.parametrize("kind", ["bool", "uint8", "int16", "uint32", "int64", "float16", "float32", "float64"])
@pytest.mark.parametrize("of", [sparse.csr_matrix, np.asarray])
def test_every_type_of_number_is_read(tmp_path: Path, kind: str, of: Any) -> None:
    values = COUNTS.astype(kind)
    data = adata(of=np.asarray)
    data.X = of(values) if kind != "float16" else values  # SciPy has no sparse float16
    corpus = corpus_of(written(tmp_path / "a.h5ad", data))
    assert (dense(corpus.training, 12) == values.astype(np.float32)).all() and corpus.counts


# ---------------------------------------------------------------- other formats


def _hdf5(path: Path, **parts: Any) -> None:
    with h5py.File(path, "w") as file:
        for name, value in parts.items():
            file[name.replace("__", "/")] = value


def _named(path: Path, content: bytes) -> None:
    path.write_bytes(content)


OTHERS: dict[str, tuple[str, Any, str]] = {
    "10x": ("a.h5", lambda p: _hdf5(p, matrix__barcodes=[b"A"], matrix__data=[1], matrix__features__id=[b"g"]),
            'is a matrix of 10x Cell Ranger (h5), not h5ad. Convert it: python -c "import scanpy; a = scanpy.read_10x_h5('),
    "10x, old": ("a.h5", lambda p: _hdf5(p, GRCh38__barcodes=[b"A"], GRCh38__genes=[b"g"]), "is a matrix of 10x Cell Ranger"),
    "10x named h5ad": ("a.h5ad", lambda p: _hdf5(p, matrix__barcodes=[b"A"]), "a.write_h5ad('{folder}/a.new.h5ad')"),
    "loom": ("a.loom", lambda p: _hdf5(p, matrix=[[1]], row_attrs__Gene=[b"g"], col_attrs__CellID=[b"c"]),
             "is a loom file. Convert it (pip install loompy): python -c \"import anndata; anndata.io.read_loom("),
    "mudata": ("a.h5mu", lambda p: _hdf5(p, mod__rna__X=[1], mod__atac__X=[1], var=[1]),
               "is a file of several modalities (MuData: atac, rna). Write out the one to train on"),
    "seurat": ("a.h5seurat", lambda p: _hdf5(p, assays__RNA=[1]), "is a file of Seurat (h5Seurat). Convert it in R"),
    "other hdf5": ("a.h5", lambda p: _hdf5(p, weights=[1]), "it is not an h5ad file. It holds weights"),
    "gz": ("a.h5ad.gz", lambda p: p.write_bytes(gzip.compress(_h5ad_bytes(p))), "is compressed with gzip"),
    "gz named h5ad": ("a.h5ad", lambda p: p.write_bytes(gzip.compress(_h5ad_bytes(p))), "Unpack it: gunzip -k"),
    "bz2": ("a.h5ad.bz2", lambda p: p.write_bytes(bz2.compress(b"x" * 999)), "is compressed with bzip2"),
    "xz": ("a.h5ad.xz", lambda p: p.write_bytes(lzma.compress(b"x" * 999)), "is compressed with xz"),
    "zip": ("a.zarr.zip", lambda p: zipfile.ZipFile(p, "w").writestr("x", "y"), "is a zip archive"),
    "sparse npz": ("a.npz", lambda p: sparse.save_npz(p, sparse.csr_matrix(COUNTS)),
                   "is a sparse matrix of SciPy (npz), without the names of genes and cells. Convert it: python -c"),
    "npz": ("a.npz", lambda p: np.savez(p, counts=COUNTS, more=[1]), "is a file of arrays of NumPy (npz: counts, more)"),
    "npy": ("a.npy", lambda p: np.save(p, COUNTS), "is an array of NumPy (npy), without the names of genes and cells"),
    "mtx": ("a.mtx", lambda p: _named(p, b"%%MatrixMarket matrix coordinate integer general\n"), "anndata.io.read_mtx("),
    "mtx.gz": ("matrix.mtx.gz", lambda p: _named(p, gzip.compress(b"%%MatrixMarket matrix\n")), "in Matrix Market format"),
    "csv": ("a.csv", lambda p: _named(p, b",g1,g2\nc1,1,2\n"), "is a table of text (csv). Convert it: python -c"),
    "tsv.gz": ("a.tsv.gz", lambda p: _named(p, gzip.compress(b"\tg1\nc1\t1\n")), "is a table of text (tsv)"),
    "rds": ("a.rds", lambda p: _named(p, gzip.compress(b"X\n\0\0")), "is a file of R. Convert it in R: zellkonverter"),
    "parquet": ("a.parquet", lambda p: _named(p, b"PAR1...."), "is a table (parquet)"),
    "web page": ("a.h5ad", lambda p: _named(p, b"<!DOCTYPE html><html><title>404</title>"), "is a web page, not data"),
    "lfs": ("a.h5ad", lambda p: _named(p, b"version https://git-lfs.github.com/spec/v1\noid"), "is a pointer of Git LFS"),
    "nothing": ("a.h5ad", lambda p: _named(p, b""), "is empty (0 bytes)"),
    "anything": ("a.h5ad", lambda p: _named(p, b"\0\1\2" * 99), "it does not begin like an HDF5 file"),
    "cut": ("a.h5ad", lambda p: _named(p, _h5ad_bytes(p)[:-2000]), "Is it complete? A copy that was cut off looks like this"),
}  # fmt: skip


def _h5ad_bytes(path: Path) -> bytes:
    return write_cells(path.with_name("whole.h5ad"), COUNTS).read_bytes()


@pytest.mark.parametrize("name", OTHERS)
def test_another_format_is_recognised_and_told_how_to_convert(tmp_path: Path, name: str) -> None:
    file, write, message = OTHERS[name]
    path = tmp_path / file
    write(path)
    with pytest.raises(DataError) as refused:
        corpus_of(path)
    assert str(refused.value).startswith(f"{path} ")
    assert message.format(folder=tmp_path) in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["sparse npz", "npz", "npy"])
def test_arrays_of_numpy_are_read_after_the_line_that_is_told(tmp_path: Path, name: str) -> None:
    file, write, _ = OTHERS[name]
    write(tmp_path / file)
    with pytest.raises(DataError) as refused:
        corpus_of(tmp_path / file)
    exec(str(refused.value).partition('python -c "')[2].partition('"')[0])
    assert (anndata.read_h5ad(tmp_path / "a.h5ad").X == COUNTS).all()


def test_a_table_of_text_is_read_after_the_line_that_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    pd.DataFrame(COUNTS, index=[f"c{i}" for i in range(60)], columns=[f"gene{i}" for i in range(12)]).to_csv(path)
    with pytest.raises(DataError) as refused:
        corpus_of(path)
    exec(str(refused.value).partition('python -c "')[2].partition('"')[0])
    corpus = corpus_of(tmp_path / "a.h5ad")
    assert (dense(corpus.training, 12) == COUNTS).all() and list(corpus.genes) == [f"gene{i}" for i in range(12)]


@pytest.mark.parametrize(
    ("holds", "message"),
    [
        (["matrix.mtx.gz", "barcodes.tsv.gz"], "is a folder of 10x Cell Ranger (mtx). Convert it: python -c"),
        (["a.h5ad", "b.zarr"], "is a folder, and data.paths names files. In it: a.h5ad, b.zarr. List them one by one"),
        (
            ["manifest.json"],
            "is a folder that `shardwise data shard` may have written: those are read with data.source: shards",
        ),
        (["notes.txt"], "is a folder, and neither a zarr store nor one with h5ad files"),
    ],
)
def test_a_folder_is_told_what_it_is(tmp_path: Path, holds: list[str], message: str) -> None:
    folder = tmp_path / "liver"
    folder.mkdir()
    for name in holds:
        (folder / name).touch()
    with pytest.raises(DataError) as refused:
        corpus_of(folder)
    assert f"{folder} {message}" in str(refused.value)


def test_a_pattern_and_an_address_are_told(tmp_path: Path) -> None:
    write_cells(tmp_path / "a.h5ad", COUNTS)
    with pytest.raises(
        DataError, match=r"data.paths takes no patterns: .* It would match .*a.h5ad. List the files one by"
    ):
        corpus_of(tmp_path / "*.h5ad")
    for address in ("s3://bucket/a.h5ad", "https://example.com/a.h5ad"):
        scheme = address.partition(":")[0]
        with pytest.raises(DataError, match=rf"^{address} is an address \({scheme}\), and only files on disk are read"):
            corpus_of(Path(address))


def test_what_has_the_name_and_is_no_file_is_told(tmp_path: Path) -> None:
    broken, loop, pipe = (tmp_path / f"{name}.h5ad" for name in ("broken", "loop", "pipe"))
    broken.symlink_to("gone.h5ad")
    loop.symlink_to("loop.h5ad")
    os.mkfifo(pipe)
    for path, what in (
        (broken, "is a broken link: it leads to gone.h5ad, which is not there"),
        (loop, "is a link to loop.h5ad that leads nowhere (Too many levels of symbolic links)"),
        (pipe, "is not a regular file but a named pipe"),
        (Path("/dev/null"), "is not a regular file but a device"),
    ):
        with pytest.raises(DataError) as refused:
            corpus_of(path)
        assert str(refused.value).startswith(f"{path} {what}")


# ---------------------------------------------------------------- locks, and storage


def test_a_locked_file_is_said_to_be_locked_and_how_to_go_on(tmp_path: Path) -> None:
    path = write_cells(tmp_path / "a.h5ad", COUNTS)
    with path.open("rb+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(DataError) as refused:
            corpus_of(path)
    said = str(refused.value)
    assert f"{path} is locked by another process" in said and "HDF5_USE_FILE_LOCKING=FALSE" in said
    assert f"process {os.getpid()}" in said and "complete" not in said and "damaged" not in said
    assert len(corpus_of(path).training) == 60


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            OSError(37, "unable to lock file, errno = 37, error message = 'No locks available'"),
            "its file system has no locks",
        ),
        (PermissionError(13, "Permission denied"), "may not be read by this user (Permission denied). Ask its owner"),
        (OSError(5, "Input/output error"), "cannot be read from its disk (Input/output error): this is the storage"),
        (
            OSError("unable to open file (file is already open for write (may use <h5clear file> to clear))"),
            "h5clear -s",
        ),
    ],
)
def test_storage_that_refuses_is_not_taken_for_a_damaged_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, message: str
) -> None:
    path = write_cells(tmp_path / "a.h5ad", COUNTS)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr(h5py, "File", fail)
    with pytest.raises(DataError) as refused:
        opening.opened(path)
    assert message in str(refused.value) and str(path) in str(refused.value) and "complete" not in str(refused.value)


def test_nothing_is_said_of_a_file_that_is_as_it_should_be(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "shardwise"):
        CellsTask(config_for(write_cells(tmp_path / "a.h5ad", COUNTS))).prepare_data()
    assert caplog.text == ""
