"""h5ad files in all their forms, aligned to a vocabulary; and what is said when one cannot be used."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import anndata
import h5py
import numpy as np
import pytest
from scipy import sparse

from shardwise.errors import DataError
from shardwise.tasks.cells.corpus import open_corpus
from shardwise.tasks.cells.rows import CellSource, gather
from shardwise.tasks.cells.task import CellsTask
from tests.cells_task.files import random_counts, write_cells
from tests.tasks import config_of


def config_for(*paths: Path, overrides: list[str] | None = None, **data: Any) -> Any:
    named = ", ".join(f"{key}: {value}" for key, value in data.items())
    text = f"task: cells\ndata: {{source: local, paths: [{', '.join(map(str, paths))}]{', ' + named if named else ''}}}"
    return config_of(text, overrides)


def corpus_of(*paths: Path, **data: Any) -> Any:
    return open_corpus(config_for(*paths, **data).data, seed=0, quiet=False)


def dense(source: CellSource, genes: int, first: int = 0, last: int | None = None) -> Any:
    rows = source.read(first, len(source) if last is None else last)
    table = np.zeros((len(rows), genes))
    table[np.repeat(np.arange(len(rows)), rows.lengths), rows.genes] = rows.values
    return table


@pytest.mark.parametrize("form", ["csr", "dense", "compressed", "int64", "float64"])
def test_the_counts_come_back_whatever_the_form(tmp_path: Path, form: str) -> None:
    counts = random_counts(50, 30)
    path = write_cells(tmp_path / "a.h5ad", counts, dense=form == "dense")
    if form != "csr" and form != "dense":
        with h5py.File(path, "r+") as file:
            values = file["X/data"][:]
            del file["X/data"]
            kind = {"compressed": "f4", "int64": "i8", "float64": "f8"}[form]
            file["X"].create_dataset("data", data=values.astype(kind), chunks=(7,), compression="gzip")
    corpus = corpus_of(path)
    assert (dense(corpus.training, 30) == counts).all()
    assert (dense(corpus.training, 30, 13, 29) == counts[13:29]).all()
    some = np.array([0, 3, 4, 30, 49])
    rows = gather(corpus.training, some, gap=2)
    assert rows.lengths.tolist() == (counts[some] > 0).sum(axis=1).tolist()


def test_files_with_different_genes_are_aligned_to_one_vocabulary(tmp_path: Path) -> None:
    first, second = random_counts(20, 4, seed=1), random_counts(30, 4, seed=2)
    paths = [
        write_cells(tmp_path / "a.h5ad", first, ["A", "B", "C", "D"]),
        write_cells(tmp_path / "b.h5ad", second, ["E", "C", "A", "F"]),
    ]
    corpus = corpus_of(*paths)
    assert list(corpus.genes) == ["A", "B", "C", "D", "E", "F"]
    table = dense(corpus.training, 6)
    assert (table[:20, :4] == first).all() and not table[:20, 4:].any()
    assert (table[20:, [4, 2, 0, 5]] == second).all() and not table[20:, [1, 3]].any()
    assert (dense(corpus.training, 6, 15, 25) == table[15:25]).all(), "a slice over the border of two files"


def test_a_given_vocabulary_decides_and_what_does_not_fit_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    counts = random_counts(20, 3)
    path = write_cells(tmp_path / "a.h5ad", counts, ["A", "B", "C"])
    vocabulary = tmp_path / "genes.txt"
    vocabulary.write_text("C\nA\nX\nY\n")
    with caplog.at_level(logging.INFO, "shardwise"):
        corpus = corpus_of(path, gene_vocab=vocabulary)
    assert list(corpus.genes) == ["C", "A", "X", "Y"]
    assert (dense(corpus.training, 4)[:, :2] == counts[:, [2, 0]]).all()
    assert f"{path} has 2 of the 4 genes of the vocabulary; 1 others are not in it and left out (B, …)" in caplog.text
    json = tmp_path / "genes.json"
    json.write_text('["C", "A", "X", "Y"]')
    assert corpus_of(path, gene_vocab=json).genes == corpus.genes


def test_the_list_that_is_not_shipped_is_replaced_by_the_genes_of_the_data_and_this_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_cells(tmp_path / "a.h5ad", random_counts(20, 3), ["A", "B", "C"])
    with caplog.at_level(logging.INFO, "shardwise"):
        corpus = corpus_of(path, gene_vocab="human_protein_coding")
    assert list(corpus.genes) == ["A", "B", "C"]
    assert (
        "human_protein_coding does not come with shardwise, so the vocabulary is the 3 genes of the data" in caplog.text
    )


def test_zeros_that_are_stored_are_no_expression(tmp_path: Path) -> None:
    path = write_cells(tmp_path / "a.h5ad", [[1, 2], [3, 4]])
    with h5py.File(path, "r+") as file:
        file["X/data"][1] = 0
    assert corpus_of(path).training.read(0, 2).lengths.tolist() == [1, 2]


def test_labels_are_numbered_over_all_files_and_may_be_absent(tmp_path: Path) -> None:
    counts = random_counts(3, 5)
    paths = [
        write_cells(tmp_path / "a.h5ad", counts, labels=["T", "B", "T"]),
        write_cells(tmp_path / "b.h5ad", counts),
        write_cells(tmp_path / "c.h5ad", counts, labels=["NK", "T", "NK"]),
    ]
    codes, names = corpus_of(*paths).training.labels()
    assert [names[code] if code >= 0 else None for code in codes] == ["T", "B", "T", None, None, None, "NK", "T", "NK"]
    assert corpus_of(paths[1]).training.labels() is None


@pytest.mark.parametrize("scale", [1, 0.5])
def test_counts_are_told_from_normalised_values(tmp_path: Path, scale: float) -> None:
    path = write_cells(tmp_path / "a.h5ad", random_counts(20, 5) * scale)
    assert corpus_of(path).counts is (scale == 1)


# ---------------------------------------------------------------- bad input


def broken(tmp_path: Path, kind: str) -> Path:
    """A file of each kind that cannot be trained on."""
    counts = random_counts(40, 5).astype(np.float32)
    path = tmp_path / "bad.h5ad"
    if kind == "nan":
        counts[17, 2] = np.nan
    elif kind == "negative":
        counts[17, 2] = -1
    elif kind.startswith("gene twice"):
        counts[17] = 1
    elif kind == "nan, dense":
        counts[17, 2] = np.nan
        return write_cells(path, counts, dense=True)
    elif kind == "twice":
        return write_cells(path, counts, ["A", "B", "C", "B", "D"])
    elif kind == "text":
        path.write_text("these are not the cells you are looking for")
        return path
    write_cells(path, counts)
    if kind == "cut":
        path.write_bytes(path.read_bytes()[:-2000])
        return path
    with h5py.File(path, "r+") as file:
        if kind == "csc":
            file["X"].attrs["encoding-type"] = "csc_matrix"
        elif kind in ("no X", "no var"):
            del file[kind.removeprefix("no ")]
        elif kind == "pointers":
            file["X/indptr"][-1] = 10**6
        elif kind == "empty":
            file["X"].attrs["shape"] = np.array([0, 5])
            del file["X/indptr"]
            file["X/indptr"] = np.array([0])
        elif kind == "columns":
            file["X/indices"][3] = -1
        elif kind in ("gene twice", "gene twice, unsorted"):
            begin = file["X/indptr"][17]
            file["X/indices"][begin : begin + 5] = [0, 1, 1, 3, 4] if kind == "gene twice" else [4, 1, 0, 3, 1]
        elif kind in ("short indptr", "short indices"):
            part = kind.removeprefix("short ")
            values = file[f"X/{part}"][:-1]
            del file[f"X/{part}"]
            file[f"X/{part}"] = values
        elif kind == "text values":
            values = file["X/data"][:].astype("S5")
            del file["X/data"]
            file["X/data"] = values
        elif kind == "no shape":
            del file["X"].attrs["shape"]
        elif kind == "old":
            del file["var"]
            file["var"] = np.array([(b"g",)], dtype=[("index", "S2")])
        elif kind == "too large":
            values = file["X/data"][:].astype("f8")
            values[2] = 1e300
            del file["X/data"]
            file["X/data"] = values
    return path


MESSAGES = {
    "nan": "cell 17 has a value that is no number (NaN or infinite). Take such cells out, or choose another layer",
    "nan, dense": "cell 17 has a value that is no number",
    "negative": "cell 17 has a negative value (-1), so these are not counts or log-normalised counts",
    "twice": "1 gene names occur more than once, for example 'B'. Make them unique (adata.var_names_make_unique())",
    "text": "cannot be opened as h5ad",
    "cut": "cannot be opened as h5ad",
    "csc": "X is stored by gene (CSC), and cells cannot be read from it. Store it by cell",
    "no X": "has no X. Layers in it: none. Set data.layer accordingly",
    "no var": "has no var, the table of genes: it is not an h5ad file",
    "pointers": "its row pointers lead outside the file",
    "empty": "has no cells",
    "columns": "name columns that X does not have: the file is damaged. Copy it again",
    "gene twice": "cell 17 has two values of the gene 'gene1' in X. Add such values up: adata.X.sum_duplicates(); adata.",
    "gene twice, unsorted": "cell 17 has two values of the gene 'gene1' in X",
    "short indptr": "the parts of X do not fit together: the file is damaged",
    "short indices": "the parts of X do not fit together: the file is damaged",
    "text values": "X holds |S5, not numbers that could be counts",
    "no shape": "is damaged or of a kind that cannot be read (KeyError",
    "old": "anndata.read_h5ad(…).write_h5ad(…)",
    "too large": "has a value that is no number (NaN or infinite)",
}


@pytest.mark.parametrize("streaming", ["true", "false"])
@pytest.mark.parametrize("kind", MESSAGES)
def test_a_file_that_cannot_be_trained_on_is_named_with_the_reason(tmp_path: Path, kind: str, streaming: str) -> None:
    path = broken(tmp_path, kind)
    task = CellsTask(config_for(path, streaming=streaming))
    with pytest.raises(DataError) as failure:
        task.prepare_data()
    assert str(path) in str(failure.value)
    assert MESSAGES[kind] in str(failure.value)


def test_genes_in_any_order_are_read_and_only_those_that_stand_twice_are_refused(tmp_path: Path) -> None:
    """The last gene of one cell may be the first of the next, and cells may be empty."""
    counts = np.array([[0, 0, 0, 4], [0, 1, 2, 3], [0, 0, 0, 0], [0, 5, 0, 6], [7, 0, 0, 0], [0, 0, 0, 0]])
    path = write_cells(tmp_path / "a.h5ad", counts)
    with h5py.File(path, "r+") as file:
        file["X/indices"][1:4] = file["X/indices"][1:4][::-1]
        file["X/data"][1:4] = file["X/data"][1:4][::-1]
    assert (dense(corpus_of(path).training, 4) == counts).all()


@pytest.mark.parametrize("layer", [None, "spliced"])
def test_values_that_are_added_up_as_the_message_says_can_be_trained_on(tmp_path: Path, layer: str | None) -> None:
    path, adata = tmp_path / "a.h5ad", anndata.AnnData(sparse.csr_matrix((4, 3), dtype=np.float32))
    matrix = sparse.csr_matrix(
        (np.ones(5, np.float32), np.array([0, 2, 1, 2, 1]), np.array([0, 2, 5, 5, 5])), shape=(4, 3)
    )
    data = {}
    if layer is None:
        adata.X = matrix
    else:
        adata.layers[layer] = matrix
        data = {"layer": layer}
    adata.obs_names, adata.var_names = ([f"{kind}{i}" for i in range(size)] for kind, size in (("c", 4), ("g", 3)))
    adata.obs.index, adata.var.index = adata.obs.index.astype(object), adata.var.index.astype(object)
    adata.write_h5ad(path)
    with pytest.raises(DataError, match=r"a.h5ad: cell 1 has two values of the gene 'g1'") as failure:
        corpus_of(path, **data)
    advice = str(failure.value).partition("Add such values up: ")[2].partition(";")[0]
    exec(advice, {"adata": adata})
    adata.write_h5ad(tmp_path / "mended.h5ad")
    assert dense(corpus_of(tmp_path / "mended.h5ad", **data).training, 3).tolist() == [
        [1, 0, 1],
        [0, 2, 1],
        [0, 0, 0],
        [0, 0, 0],
    ]


def test_a_file_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    write_cells(tmp_path / "liver.h5ad", random_counts(5, 5))
    with pytest.raises(
        DataError, match=r"there is no file .*/liver2.h5ad. In that folder: liver.h5ad. Check data.paths"
    ):
        corpus_of(tmp_path / "liver2.h5ad")


def test_no_gene_in_common_shows_how_both_name_them(tmp_path: Path) -> None:
    path = write_cells(tmp_path / "a.h5ad", random_counts(5, 3), ["ENSG1", "ENSG2", "ENSG3"])
    vocabulary = tmp_path / "genes.txt"
    vocabulary.write_text("TP53\nBRCA1\n")
    with pytest.raises(
        DataError, match=r"no gene in common .* like ENSG1, ENSG2, ENSG3, the vocabulary like TP53, BRCA1"
    ):
        corpus_of(path, gene_vocab=vocabulary)


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "names no genes"), ("A\nB\nA\n", "names 1 genes more than once"), (None, "cannot be read")],
)
def test_a_vocabulary_that_cannot_be_used(tmp_path: Path, content: str | None, message: str) -> None:
    path = write_cells(tmp_path / "a.h5ad", random_counts(5, 3), ["A", "B", "C"])
    vocabulary = tmp_path / "genes.txt"
    if content is not None:
        vocabulary.write_text(content)
    with pytest.raises(DataError, match=message):
        corpus_of(path, gene_vocab=vocabulary)


def test_a_layer_or_column_that_is_not_there_is_answered_with_those_that_are(tmp_path: Path) -> None:
    counts = random_counts(5, 3)
    path = write_cells(tmp_path / "a.h5ad", counts, labels=["T"] * 5, layers={"spliced": counts.astype(np.float32)})
    assert corpus_of(path, layer="spliced").counts
    with pytest.raises(DataError, match=r"has no adata.raw, and it has no layers/raw. Layers in it: spliced"):
        corpus_of(path, layer="raw")
    with pytest.raises(DataError, match=r"obs has no column 'tissue'. It has: .*cell_type"):
        corpus_of(path, label_key="tissue").training.labels()
    with pytest.raises(DataError, match=r"var has no column 'symbol'"):
        corpus_of(path, gene_key="symbol")


def test_counts_and_normalised_values_do_not_mix(tmp_path: Path) -> None:
    paths = [write_cells(tmp_path / f"{i}.h5ad", random_counts(20, 5) * scale) for i, scale in enumerate((1, 0.37))]
    with pytest.raises(
        DataError, match=r"(?s)different scales.*0.h5ad: whole numbers \(counts\).*1.h5ad: values that look"
    ):
        corpus_of(*paths)


def test_a_file_named_twice_is_refused(tmp_path: Path) -> None:
    path = write_cells(tmp_path / "a.h5ad", random_counts(20, 5))
    (tmp_path / "b.h5ad").symlink_to(path)
    with pytest.raises(DataError, match=r"data.paths names .*a.h5ad twice: its cells would be trained on and held out"):
        corpus_of(path, tmp_path / "b.h5ad")
