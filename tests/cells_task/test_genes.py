"""The names of genes: those that say nothing, those that are missing, and files that name the same genes otherwise."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import anndata
import h5py
import numpy as np
import pandas as pd
import pytest

from shardwise.errors import DataError
from shardwise.tasks.cells.task import CellsTask
from tests.cells_task.files import random_counts, write_cells
from tests.cells_task.test_h5ad import config_for, corpus_of, dense
from tests.cells_task.test_scale import prepared

GENES = 12
SYMBOLS = [f"G{i}" for i in range(GENES)]
ENSEMBL = [f"ENSG{i:011d}" for i in range(GENES)]
NUMBERS = [str(i) for i in range(GENES)]


def file_of(path: Path, names: list[str], seed: int = 0, **columns: Any) -> Path:
    """A file whose var has these columns besides its index."""
    write_cells(path, random_counts(40, len(names), seed, density=0.6) + (np.arange(len(names)) == 0), names)
    if columns:
        data = anndata.read_h5ad(path)
        for name, values in columns.items():
            data.var[name] = pd.Series(values, dtype=object, index=data.var_names).astype("category")
        data.write_h5ad(path)
    return path


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_genes_that_are_only_numbered_are_told_where_there_is_one_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = file_of(tmp_path / "a.h5ad", NUMBERS)
    prepared(path, caplog=caplog)
    assert [f"{path}: its genes have no names but row numbers (0, 1, 2, …, 11) in the index of var" in w for w in
            warnings_of(caplog)] == [True]  # fmt: skip
    prepared(path, caplog=caplog, gene_key="_index")
    assert warnings_of(caplog) == []


@pytest.mark.parametrize("numbers", [NUMBERS, ["3", "7", "20", "31", "400", "5000", "5001", "6000", "6001", "7000", "8000",
                                               "30000"]])  # fmt: skip
def test_numbers_are_refused_where_they_would_be_taken_for_the_same_genes(tmp_path: Path, numbers: list[str]) -> None:
    first, second = (file_of(tmp_path / f"{n}.h5ad", numbers, n) for n in (1, 2))
    with pytest.raises(
        DataError, match=r"1.h5ad: its genes have no names but row numbers .* of the other files they are"
    ):
        corpus_of(first, second)
    vocabulary = tmp_path / "genes.txt"
    vocabulary.write_text("\n".join(numbers))
    with pytest.raises(DataError, match=r"which genes of .*genes.txt they are. .* say so with data.gene_key: _index"):
        corpus_of(first, gene_vocab=vocabulary)
    assert list(corpus_of(first, second, gene_key="_index").genes) == numbers


def test_entrez_ids_are_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = ["1", "2", "9", "10", "672", "7157", "100130426", "100287102"]
    prepared(file_of(tmp_path / "a.h5ad", names), file_of(tmp_path / "b.h5ad", names, 1), caplog=caplog)
    assert warnings_of(caplog) == []


def test_the_column_with_the_names_is_told(tmp_path: Path) -> None:
    path = file_of(tmp_path / "a.h5ad", NUMBERS, symbol=SYMBOLS, chromosome=["1", "X"] * (GENES // 2), rank=NUMBERS)
    with pytest.raises(
        DataError, match=r"Set data.gene_key to the column with their names \(symbol: G0, G1, G2\), or to _in"
    ):
        corpus_of(path)
    assert list(corpus_of(path, gene_key="symbol").genes) == SYMBOLS


@pytest.mark.parametrize("nothing", [np.nan, None, "", "  ", "nan", "NaN", "<NA>"])
def test_genes_without_a_name_are_left_out_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, nothing: Any
) -> None:
    names: list[Any] = [*SYMBOLS]
    names[2] = nothing
    path = file_of(tmp_path / "a.h5ad", ENSEMBL, symbol=names)
    prepared(path, caplog=caplog, gene_key="symbol")
    (said,) = warnings_of(caplog)
    assert f"{path}: 1 of 12 genes have no name in var['symbol'] (NaN or empty: columns 2). They are left out" in said
    corpus = corpus_of(path, gene_key="symbol")
    assert list(corpus.genes) == SYMBOLS[:2] + SYMBOLS[3:]
    everything = dense(corpus_of(path).training, GENES)
    assert (dense(corpus.training, GENES - 1) == np.delete(everything, 2, axis=1)).all()


def test_a_column_where_most_names_are_missing_is_refused(tmp_path: Path) -> None:
    path = file_of(tmp_path / "a.h5ad", ENSEMBL, symbol=[*SYMBOLS[:5], *[np.nan] * 7])
    with pytest.raises(
        DataError, match=r"7 of 12 genes have no name in var\['symbol'\] .* data.gene_key \(_index: ENSG000"
    ):
        corpus_of(path, gene_key="symbol")


def test_names_that_occur_twice_are_counted_with_examples_and_other_columns(tmp_path: Path) -> None:
    path = file_of(tmp_path / "a.h5ad", ENSEMBL, symbol=["A", "B", "A", "B", "A", *SYMBOLS[5:]])
    with pytest.raises(DataError, match=r"3 gene names occur more than once, for example 'A', 'B'. .*\(_index: ENSG"):
        corpus_of(path, gene_key="symbol")


@pytest.mark.parametrize("key", ["symbol", None])
def test_a_name_that_stands_where_there_is_none_is_told_as_such(tmp_path: Path, key: str | None) -> None:
    names = [*["unknown"] * 6, "B", "B", *SYMBOLS[8:]]
    path = file_of(tmp_path / "a.h5ad", names if key is None else ENSEMBL, symbol=ENSEMBL if key is None else names)
    with pytest.raises(DataError) as refused:
        corpus_of(path, **({"gene_key": key} if key else {}))
    said = str(refused.value)
    assert f"{path}: 6 of its 12 genes have the same name, 'unknown', in " in said and "make_unique" not in said
    assert f"adata[:, adata.{'var[' + repr(key) + ']' if key else 'var_names'} != 'unknown']" in said
    assert "data.gene_key (" in said and ENSEMBL[0] in said


def test_a_column_of_categories_or_of_text_that_may_be_missing_is_read(tmp_path: Path) -> None:
    path = file_of(tmp_path / "a.h5ad", ENSEMBL, symbol=SYMBOLS)
    with h5py.File(path, "r+") as file:
        assert file["var/symbol"].attrs["encoding-type"] == "categorical"
        group = file["var"].create_group("nullable")
        group.attrs.update({"encoding-type": "nullable-string-array", "encoding-version": "0.1.0", "na-value": "NA"})
        for name, values, kind in (
            ("values", np.array(SYMBOLS, object), "string-array"),
            ("mask", np.arange(GENES) == 4, "array"),
        ):
            group[name] = values
            group[name].attrs.update({"encoding-type": kind, "encoding-version": "0.2.0"})
    assert list(corpus_of(path, gene_key="symbol").genes) == SYMBOLS
    assert list(corpus_of(path, gene_key="nullable").genes) == SYMBOLS[:4] + SYMBOLS[5:]


def test_a_transposed_matrix_is_noticed_by_its_barcodes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    barcodes = ["".join(rng.choice(list("ACGT"), 16)) + "-1" for _ in range(GENES)]
    path = file_of(tmp_path / "a.h5ad", barcodes)
    with pytest.raises(DataError, match=r"look like the barcodes of cells \([ACGT]{16}-1, .*transposed\? .*adata.T"):
        corpus_of(path)
    assert list(corpus_of(path, gene_key="_index").genes) == barcodes
    corpus_of(file_of(tmp_path / "b.h5ad", ["CAT", "ACTG1", "GATA1", "TNNT2", "ATG12"]))


# ---------------------------------------------------------------- several files


def test_files_that_name_genes_otherwise_are_refused_with_the_column_that_fits(tmp_path: Path) -> None:
    first = file_of(tmp_path / "a.h5ad", SYMBOLS)
    second = file_of(tmp_path / "b.h5ad", ENSEMBL, 1, feature_name=SYMBOLS)
    with pytest.raises(DataError) as refused:
        corpus_of(first, second)
    said = str(refused.value)
    assert (
        f"{second} has no gene in common with {first}: one names genes like {', '.join(ENSEMBL[:3])}, the other" in said
    )
    assert "Its column 'feature_name' of var has 12 of them: set data.gene_key: feature_name" in said
    both = tmp_path / "genes.txt"
    both.write_text("\n".join([*SYMBOLS, *ENSEMBL]))
    assert len(corpus_of(first, second, gene_vocab=both).genes) == 2 * GENES, "who means it names them all"


def test_files_that_share_genes_by_way_of_another_are_trained_on(tmp_path: Path) -> None:
    panels = [["A", "B", "C"], ["X", "Y", "Z"], ["C", "X", "B", "Y", "Q"]]
    paths = [file_of(tmp_path / f"{n}.h5ad", names, n) for n, names in enumerate(panels)]
    assert len(corpus_of(*paths).genes) == 7
    with pytest.raises(DataError, match=r"1.h5ad has no gene in common with .*0.h5ad"):
        corpus_of(*paths[:2])


def test_few_shared_genes_are_told_with_counts_and_examples(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = file_of(tmp_path / "a.h5ad", ["G0", "G1", *[f"H{i}" for i in range(10)]])
    second = file_of(tmp_path / "b.h5ad", SYMBOLS, 1)
    prepared(first, second, caplog=caplog)
    said = warnings_of(caplog)
    assert len(said) == 2
    assert f"{first} has 2 of its 12 genes in common with the other files; only there: H0, H1, H2" in said[0]
    panel = file_of(tmp_path / "c.h5ad", SYMBOLS[:3], 2)
    prepared(second, panel, caplog=caplog)
    assert not any("in common" in said for said in warnings_of(caplog)), "all genes of a panel are in the other"


def test_a_vocabulary_that_names_few_of_the_genes_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = file_of(tmp_path / "a.h5ad", ENSEMBL, symbol=SYMBOLS)
    vocabulary = tmp_path / "genes.txt"
    vocabulary.write_text("\n".join([ENSEMBL[0], *SYMBOLS]), encoding="utf-8-sig")
    prepared(path, caplog=caplog, gene_vocab=vocabulary)
    assert any(
        "has 1 of the 13 genes of the vocabulary; 11 others are not in it and left out" in said
        and "Its column 'symbol' of var has 12 of them: set data.gene_key: symbol" in said
        for said in warnings_of(caplog)
    )
    prepared(path, caplog=caplog, gene_vocab=vocabulary, gene_key="symbol")
    assert warnings_of(caplog) == []


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.json",
            '{"genes": ["G0", "G1"]}',
            'begins with \'{"genes": ["G0", "G1"]}\', and is expected to be a list of names',
        ),
        ("a.json", '[["G0"], ["G1"]]', "or an object with the names as keys"),
        ("a.json", '"G0"', "is expected to be a list of names"),
        ("a.txt", ",".join(f"G{i}" for i in range(20_000)), "looks comma-separated, and one gene per line is expected"),
        ("a.tsv", "ENSG1\tG0\nENSG2\tG1\nENSG3", "looks tab-separated"),
        ("a.csv", "G0;1\nG1;2\n", "looks semicolon-separated"),
    ],
)
def test_a_vocabulary_of_another_kind_is_refused_with_what_is_expected(
    tmp_path: Path, name: str, content: str, message: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError) as refused:
        corpus_of(file_of(tmp_path / "a.h5ad", SYMBOLS), gene_vocab=tmp_path / name)
    said = str(refused.value)
    assert f"data.gene_vocab: {tmp_path / name} " in said and message in said and len(said) < 400 + len(str(tmp_path))


def test_a_vocabulary_in_json_is_a_list_or_has_a_number_for_each_gene(tmp_path: Path) -> None:
    path = file_of(tmp_path / "a.h5ad", SYMBOLS)
    for content in (json.dumps(SYMBOLS), json.dumps({name: number for number, name in enumerate(SYMBOLS)})):
        (tmp_path / "a.json").write_text(content)
        assert list(corpus_of(path, gene_vocab=tmp_path / "a.json").genes) == SYMBOLS


def test_long_names_are_cut_where_they_are_quoted(tmp_path: Path) -> None:
    first, second = (
        file_of(tmp_path / f"{n}.h5ad", [mark * 5_000 + str(i) for i in range(GENES)]) for n, mark in enumerate("GH")
    )
    with pytest.raises(DataError, match=rf"like {'H' * 40}…, {'H' * 40}…") as refused:
        corpus_of(first, second)
    assert len(str(refused.value)) < 2_000


def test_what_holds_for_many_files_is_told_once_with_their_number(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    paths = [file_of(tmp_path / f"{n}.h5ad", ["G0", *[f"H{n}-{i}" for i in range(GENES - 1)]], n) for n in range(8)]
    prepared(*paths, caplog=caplog)
    (said,) = warnings_of(caplog)
    assert f"{paths[0]} has 1 of its 12 genes in common with the other files" in said
    assert f"for 7 more files: {paths[1]}, {paths[2]}, {paths[3]}, …" in said
    assert sum("genes of the vocabulary" in record.getMessage() for record in caplog.records) == 1
    symbols = [None, *SYMBOLS[1:]]
    paths = [file_of(tmp_path / f"{n}.h5ad", ENSEMBL, n, symbol=symbols) for n in range(8)]
    prepared(*paths, caplog=caplog, gene_key="symbol")
    (said,) = warnings_of(caplog)
    assert "1 of 12 genes have no name" in said and "for 7 more files" in said


def test_a_vocabulary_of_one_gene_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    prepared(file_of(tmp_path / "a.h5ad", ["A"]), caplog=caplog)
    assert any(
        "the vocabulary is one gene, A: there are no others to predict it from" in w for w in warnings_of(caplog)
    )


@pytest.mark.parametrize(
    ("one", "other", "pairs"),
    [
        (
            SYMBOLS,
            ["g0", "g1", *SYMBOLS[2:]],
            "differ only in case or version, 2 in all, are trained on as different ones: G0, g0; G1, g1.",
        ),
        (
            ENSEMBL,
            [f"{ENSEMBL[0]}.2", *ENSEMBL[1:]],
            f"in case or version, 1 in all, are trained on as different ones: {ENSEMBL[0]}, ",
        ),
        ([f"{e}.5" for e in ENSEMBL], [f"{ENSEMBL[0]}.6", *[f"{e}.5" for e in ENSEMBL[1:]]], ".5, ENSG00000000000.6."),
        ([*SYMBOLS[:-1], "g0"], None, "in case or version, 1 in all, are trained on as different ones: G0, g0."),
        ([*SYMBOLS[:-2], "RP11-34P13.7", "RP11-34P13.8"], None, None),
    ],
)
def test_names_that_differ_only_in_case_or_version_are_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, one: list[str], other: list[str] | None, pairs: str | None
) -> None:
    paths = [file_of(tmp_path / f"{n}.h5ad", names, n) for n, names in enumerate((one, other)) if names]
    prepared(*paths, caplog=caplog)
    assert [pairs in said for said in warnings_of(caplog) if pairs] == ([True] if pairs else [])
    assert pairs or not warnings_of(caplog)


def test_antibodies_and_peaks_among_the_genes_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kinds = ["Gene Expression"] * 8 + ["Antibody Capture"] * 4
    path = file_of(tmp_path / "a.h5ad", SYMBOLS, feature_types=kinds)
    prepared(path, caplog=caplog)
    (said,) = warnings_of(caplog)
    assert f"{path}: what it calls genes is of several kinds (Gene Expression: 8, Antibody Capture: 4)" in said
    assert "adata[:, adata.var['feature_types'] == 'Gene Expression']" in said
    prepared(file_of(tmp_path / "b.h5ad", SYMBOLS, feature_types=kinds[:1] * GENES), caplog=caplog)
    assert warnings_of(caplog) == []


def test_what_counts_reads_of_no_gene_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = file_of(tmp_path / "a.h5ad", [*SYMBOLS, "__no_feature", "__ambiguous", "N_unmapped"])
    prepared(path, caplog=caplog)
    (said,) = warnings_of(caplog)
    assert f"{path}: 3 of its genes count reads that belong to none (__no_feature, __ambiguous, N_unmapped)" in said


def test_files_whose_cells_have_the_same_names_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    letters = np.random.default_rng(0).choice(list("ACGT"), (80, 16))
    barcodes = [f"{''.join(row)}-1" for row in letters]
    for shared in (40, 20, 4):  # of 40
        paths = [file_of(tmp_path / f"{seed}.h5ad", SYMBOLS, seed) for seed in (1, 2)]
        for path, names in zip(paths, (barcodes[:40], barcodes[40 - shared : 80 - shared]), strict=True):
            data = anndata.read_h5ad(path)
            data.obs_names = names
            data.write_h5ad(path)
        prepared(*paths, caplog=caplog)
        said = [text for text in warnings_of(caplog) if "have the name of a cell of" in text]
        assert [f"{shared} of the 40 cells of {paths[0]}" in text for text in said] == ([True] if shared > 8 else [])


def test_labels_that_hardly_two_cells_share_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for groups, told in ((60, 1), (6, 0)):
        path = write_cells(
            tmp_path / "a.h5ad",
            random_counts(60, GENES) + 1,
            SYMBOLS,
            labels=[f"c{cell % groups}" for cell in range(60)],
        )
        prepared(path, caplog=caplog)
        said = warnings_of(caplog)
        assert len(said) == told
        assert not told or "data.label_key: cell_type has 60 different values for 60 cells" in said[0]


@pytest.mark.parametrize("strategy", ["rank_value", "binned_expression", "continuous_projection"])
def test_names_of_cells_may_occur_twice(tmp_path: Path, strategy: str) -> None:
    """Barcodes do, in files made of several samples: what tells a cell is its row."""
    path = file_of(tmp_path / "a.h5ad", SYMBOLS)
    with h5py.File(path, "r+") as file:
        file["obs/_index"][:] = np.array(["AAAC-1"] * 40, object)
    task = CellsTask(config_for(path, overrides=[f"tokenizer.strategy={strategy}"]))
    task.prepare_data()
    assert len(set(task.train_data().read(np.arange(38), 0)["cells"].tolist())) == 38
