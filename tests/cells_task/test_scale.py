"""What the values of files are: seen in every file, all over it, and told; different scales are never trained on together."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anndata
import h5py
import numpy as np
import pytest
from scipy import sparse

from shardwise.errors import DataError
from shardwise.tasks.cells import check
from shardwise.tasks.cells.corpus import open_corpus
from shardwise.tasks.cells.export import embed
from shardwise.tasks.cells.sharding import shard_cells
from shardwise.tasks.cells.task import CellsTask
from tests.cells_task.files import random_counts, write_cells
from tests.cells_task.test_h5ad import config_for

Values = Any


def counts(cells: int = 300, genes: int = 40, seed: int = 0) -> Values:
    """Counts as sparse as real ones: mostly zeros and ones, and of very different depth."""
    rng = np.random.default_rng(seed)
    depth = rng.lognormal(0, 0.5, (cells, 1))
    return rng.poisson(rng.gamma(0.6, 2.0, (cells, genes)) * depth).astype(np.float32)


def normalised(values: Values, total: float = 10_000) -> Values:
    return values / np.maximum(values.sum(axis=1, keepdims=True), 1) * total


def logged(values: Values, total: float = 10_000) -> Values:
    return np.log1p(normalised(values, total))


def prepared(*paths: Path, caplog: pytest.LogCaptureFixture | None = None, **data: Any) -> str:
    """What preparing the data says."""
    if caplog is None:
        CellsTask(config_for(*paths, **data)).prepare_data()
        return ""
    caplog.clear()
    with caplog.at_level(logging.INFO, "shardwise"):
        CellsTask(config_for(*paths, **data)).prepare_data()
    return caplog.text


SCALES: dict[str, tuple[Callable[[Values], Values], str]] = {
    "counts": (lambda v: v, "whole numbers (counts), the largest"),
    "presence": (lambda v: v > 0, "ones only (whether a gene is expressed, not how much)"),
    "normalised": (normalised, "normalised values, not logged: each cell adds up to 10000"),
    "fractions": (lambda v: normalised(v, 1), "normalised values, not logged: each cell adds up to 1"),
    "logged": (logged, "logged values (natural logarithm): before the log each cell adds up to 10000"),
    "logged, of a million": (lambda v: logged(v, 1e6), "before the log each cell adds up to 1e+06"),
    "log2": (lambda v: np.log2(1 + normalised(v)), "logged values (base 2): before the log each cell adds up to 10000"),
    "log10": (
        lambda v: np.log10(1 + normalised(v)),
        "logged values (base 10): before the log each cell adds up to 10000",
    ),
    "fractions of many genes": (
        lambda v: normalised(np.hstack([v] * 8), 1),
        "normalised values, not logged: each cell adds up to 1;",
    ),
    "fractions, logged": (
        lambda v: logged(v, 1),
        "logged values (natural logarithm): before the log each cell adds up to 1",
    ),
    "percentages": (lambda v: normalised(v, 100), "normalised values, not logged: each cell adds up to 100"),
    "counts, logged and taken back in fp32": (
        lambda v: np.expm1(np.log1p(v)).astype(np.float32),
        "whole numbers (counts), the largest 33",
    ),
    "logged counts": (np.log1p, "logged counts (natural logarithm), which were not normalised before"),
    "log2 of counts": (lambda v: np.log2(1 + v), "logged counts (base 2), which were not normalised before"),
    "some genes, logged": (lambda v: logged(v)[:, :15], "values that look logged, the largest"),
    "some genes, normalised": (
        lambda v: normalised(v)[:, :15],
        "values that are neither whole nor logged, the largest",
    ),
    "in two bytes": (lambda v: logged(v).astype(np.float16).astype(np.float32), "logged values (natural logarithm)"),
    "halves": (lambda v: v * 0.5, "values that are not whole, the largest 16.5: logged or not cannot be told"),
}


@pytest.mark.parametrize("name", SCALES)
@pytest.mark.parametrize("dense", [True, False])
def test_the_scale_of_a_file_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, dense: bool) -> None:
    change, text = SCALES[name]
    path = write_cells(tmp_path / "a.h5ad", change(counts()), dense=dense)
    assert text in prepared(path, caplog=caplog)
    assert open_corpus(config_for(path).data, 0).counts is (name.startswith("counts") or name == "presence")


PAIRS = [
    ("counts", "logged"), ("counts", "normalised"), ("counts", "some genes, logged"), ("counts", "logged counts"),
    ("normalised", "logged"), ("normalised", "log2"), ("some genes, normalised", "logged"), ("presence", "logged"),
]  # fmt: skip


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_files_of_different_scales_are_refused_and_each_is_named_with_what_it_is(
    tmp_path: Path, one: str, other: str
) -> None:
    kinds = [one, other, one]
    paths = [
        write_cells(tmp_path / f"{n}.h5ad", SCALES[kind][0](counts(seed=n))[:, :15]) for n, kind in enumerate(kinds)
    ]
    with pytest.raises(DataError, match="different scales, which cannot be trained on together") as refused:
        open_corpus(config_for(*paths).data, 0)
    lines = str(refused.value).splitlines()[1:-1]
    assert [line.strip().split(": ")[0] for line in lines] == [str(path) for path in paths]
    assert lines[0] != lines[1] and "data.layer" in str(refused.value)


@pytest.mark.parametrize(("one", "other"), list(itertools.permutations(["logged", "log2", "log10"], 2)))
def test_files_logged_in_different_bases_are_refused_and_the_bases_are_named(
    tmp_path: Path, one: str, other: str
) -> None:
    paths = [write_cells(tmp_path / f"{kind}.h5ad", SCALES[kind][0](counts())) for kind in (one, other)]
    with pytest.raises(DataError, match="different scales, which cannot be trained on together") as refused:
        open_corpus(config_for(*paths).data, 0)
    for path, kind in zip(paths, (one, other), strict=True):
        assert f"  {path}: {SCALES[kind][1]}" in str(refused.value)


def test_logged_counts_of_different_bases_are_refused_too(tmp_path: Path) -> None:
    paths = [
        write_cells(tmp_path / f"{kind}.h5ad", SCALES[kind][0](counts()))
        for kind in ("logged counts", "log2 of counts")
    ]
    with pytest.raises(DataError, match=r"logged counts \(natural logarithm\)[^\n]*\n.*logged counts \(base 2\)"):
        open_corpus(config_for(*paths).data, 0)


@pytest.mark.parametrize("share", [0.5, 0.1])
def test_cells_of_one_file_that_were_logged_in_different_bases_are_refused(tmp_path: Path, share: float) -> None:
    cells, first = counts(cells=1000), 1000 - round(1000 * share)
    mixed = np.vstack([logged(cells[:first]), np.log2(1 + normalised(cells[first:]))])
    with pytest.raises(
        DataError, match=r"hold logged values \(natural logarithm\), such as cell 0, .*\(base 2\), such as"
    ):
        prepared(write_cells(tmp_path / "a.h5ad", mixed))
    turns = np.stack([np.log10(1 + normalised(cells)), logged(cells), np.log2(1 + normalised(cells))])
    thirds = np.concatenate([turns[base, base::3] for base in range(3)])
    with pytest.raises(DataError, match=r"base 10.*natural|natural.*base 10"):
        prepared(write_cells(tmp_path / "b.h5ad", thirds))


def test_cells_that_lost_genes_after_they_were_logged_are_no_other_base(tmp_path: Path) -> None:
    cells = logged(counts(cells=1000))
    cells[::20, ::2] = 0
    cells[5::50] = cells[0]
    assert prepared(write_cells(tmp_path / "a.h5ad", cells)) == ""


def test_fractions_among_logged_cells_are_found(tmp_path: Path) -> None:
    cells = counts(cells=600)
    mixed = np.vstack([logged(cells[:400]), normalised(cells[400:], 1)])
    paths = [write_cells(tmp_path / f"{n}.h5ad", part) for n, part in enumerate((mixed[:400], mixed[400:]))]
    with pytest.raises(DataError, match="files of different scales"):
        prepared(*paths)
    with pytest.raises(
        DataError, match=r"hold logged values \(natural .*, \d+ hold values that are not logged, such as c"
    ):
        prepared(write_cells(tmp_path / "a.h5ad", mixed))


OTHERWISE: dict[str, Callable[[Values], Values]] = {
    "logged twice": lambda v: np.log1p(logged(v)),
    "logged counts": np.log1p,
    "roots": np.sqrt,
    "scaled by gene": lambda v: logged(v) / (logged(v).std(axis=0) + 1e-6),
    "some genes": lambda v: logged(v)[:, :15],
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_a_file_whose_cells_add_up_to_no_total_beside_one_whose_cells_do_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    paths = [
        write_cells(tmp_path / "a.h5ad", logged(counts())),
        write_cells(tmp_path / "b.h5ad", OTHERWISE[name](counts(seed=1))),
    ]
    said = prepared(*paths, caplog=caplog)
    assert (
        f"the files may be of different scales: {paths[0]}: logged values (natural logarithm): before the log" in said
    )
    assert f"; {paths[1]}: " in said and "genes left out" not in said
    assert "40 genes, values that are not alike in all files; 40 genes per cell" in said, "no scale is told for both"
    alone = [write_cells(tmp_path / f"{n}.h5ad", OTHERWISE[name](counts(seed=n))) for n in (1, 2)]
    assert "may be of different scales" not in prepared(*alone, caplog=caplog)


def test_of_many_files_that_are_alike_a_few_are_named(tmp_path: Path) -> None:
    kinds = ["logged"] * 12 + ["counts"]
    paths = [write_cells(tmp_path / f"{n}.h5ad", SCALES[kind][0](counts(60, seed=n))) for n, kind in enumerate(kinds)]
    with pytest.raises(DataError) as refused:
        open_corpus(config_for(*paths).data, 0)
    lines = str(refused.value).splitlines()
    assert (
        len(lines) == 6 and lines[3].endswith("(and 9 more like it)") and lines[4].startswith(f"  {paths[12]}: whole")
    )


def test_numbers_that_are_further_from_whole_than_rounding_are_no_counts(tmp_path: Path) -> None:
    path = write_cells(tmp_path / "a.h5ad", counts() * 1.0001)
    assert not open_corpus(config_for(path).data, 0).counts


# Of the others, nothing but the size of the values tells: see test_cells_that_only_look_as_if_they_were_of_different_scales.
MIXTURES = [
    (*pair, share)
    for pair in PAIRS
    for share in (0.5, 0.03)
    if "some genes, normalised" not in pair and (pair[0], share) != ("presence", 0.03)
]


@pytest.mark.parametrize(("one", "other", "share"), MIXTURES)
def test_a_file_whose_own_cells_are_of_different_scales_is_refused(
    tmp_path: Path, one: str, other: str, share: float
) -> None:
    """Halves, as of two atlases, and a few cells at the end."""
    cells = counts(cells=1000, genes=15)
    first = 1000 - round(1000 * share)
    mixed = np.vstack([SCALES[one][0](cells[:first]), SCALES[other][0](cells[first:])])
    with pytest.raises(DataError, match=r"a.h5ad: its cells are of different scales: \d+ of the \d+ looked at hold"):
        prepared(write_cells(tmp_path / "a.h5ad", mixed))


def test_cells_that_only_look_as_if_they_were_of_different_scales_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cells = counts(genes=40)
    mixed = np.vstack([normalised(cells[:150]), logged(cells[150:])])[:, :15]
    said = prepared(write_cells(tmp_path / "a.h5ad", mixed), caplog=caplog)
    assert "a.h5ad: some cells look logged, such as cell 150, and others do not, such as cell 0" in said


def test_cells_that_take_turns_are_noticed_too(tmp_path: Path) -> None:
    cells = counts()
    for number, (one, other) in enumerate([(cells, logged(cells)), (normalised(cells), logged(cells))]):
        turns = np.where((np.arange(300) % 2 == 0)[:, None], one, other)
        with pytest.raises(DataError, match="of different scales"):
            prepared(write_cells(tmp_path / f"{number}.h5ad", turns))


def test_the_first_cells_do_not_decide(tmp_path: Path) -> None:
    cells = counts(cells=3000, genes=20)
    cells[2900:] = logged(cells[2900:])
    path = write_cells(tmp_path / "a.h5ad", cells)
    with pytest.raises(DataError, match=r"hold logged values, such as cell 2\d\d\d, .* hold whole numbers"):
        prepared(path)
    with pytest.raises(DataError, match="of different scales"):
        shard_cells(config_for(path).data, 0, tmp_path / "copy", cells_per_shard=1000)
    assert not (tmp_path / "copy").exists()


def test_one_broken_number_among_counts_is_found(tmp_path: Path) -> None:
    cells = counts(cells=2500, genes=20)
    cells[1777, 3] = 2.5
    path = write_cells(tmp_path / "a.h5ad", cells)
    with pytest.raises(
        DataError, match=r"1 of the 2\d\d\d looked at hold values that are not whole .* as cell 1777, and 2"
    ):
        prepared(path)


def test_whole_numbers_by_chance_are_no_other_scale(tmp_path: Path) -> None:
    """2,000 counts, scaled to 10,000, are whole numbers. And a cell of one gene has 10,000 of it."""
    cells = counts(cells=300)
    cells[:30] = 0
    cells[:30, :4] = 500
    cells[30:40] = 0
    cells[30:40, 7] = 3
    path = write_cells(tmp_path / "a.h5ad", normalised(cells))
    prepared(path)
    assert not open_corpus(config_for(path).data, 0).counts


def test_zeros_that_are_stored_hide_no_mixture(tmp_path: Path) -> None:
    cells = counts(cells=200, genes=20)
    cells[100:] = normalised(cells[100:])
    cells = cells[:, :12]
    path = write_cells(tmp_path / "a.h5ad", cells + 1000)
    with h5py.File(path, "r+") as file:
        file["X/data"][:] = file["X/data"][:] - 1000
    with pytest.raises(DataError, match="of different scales"):
        prepared(path)


def test_cells_that_are_all_alike_and_large_are_no_logs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_cells(tmp_path / "a.h5ad", np.full((40, 3), 60.5))
    assert "normalised values, not logged: each cell adds up to 181.5" in prepared(path, caplog=caplog)


def test_of_a_huge_corpus_every_file_is_looked_at_all_over() -> None:
    cells = 3_000_000
    bounds = [0, cells, cells + 50, cells + 2_000_000]
    pieces = list(check._pieces(bounds, check.PIECE, check.MOST_PIECES, check.FEWEST_OF_A_FILE))
    assert sum(last - first for _, first, last in pieces) < 1.1 * check.PIECE * check.MOST_PIECES
    for number, (begin, end) in enumerate(itertools.pairwise(bounds)):
        own = [(first, last) for file, first, last in pieces if file == number]
        assert own[0][0] == begin and own[-1][1] == end
        assert max(b[0] - a[1] for a, b in itertools.pairwise(own)) < 10_000 if len(own) > 1 else True
    small = list(check._pieces([0, 5000], check.PIECE, check.MOST_PIECES, check.FEWEST_OF_A_FILE))
    assert [first for _, first, _ in small] == list(range(0, 5000, check.PIECE)) and small[-1][2] == 5000


@pytest.mark.parametrize(
    ("kind", "normalize", "said"),
    [
        ("logged", "log1p", "data.normalize: log1p would log them again"),
        ("normalised", "auto", "data.normalize: log1p scales and logs them"),
        ("presence", "auto", "there is no expression to predict"),
        ("logged", "auto", None),
        ("counts", "auto", None),
        ("counts", "log1p", None),
        ("normalised", "none", None),
        ("normalised", "log1p", None),
    ],
)
def test_values_that_do_not_fit_data_normalize_are_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, normalize: str, said: str | None
) -> None:
    path = write_cells(tmp_path / "a.h5ad", SCALES[kind][0](counts()))
    prepared(path, caplog=caplog, normalize=normalize)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    if said is None:
        assert warnings == []
    else:
        assert len(warnings) == 1 and said in warnings[0] and str(path) in warnings[0]


def test_many_files_that_do_not_fit_data_normalize_are_told_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    paths = [write_cells(tmp_path / f"{n}.h5ad", normalised(counts(60, seed=n))) for n in range(6)]
    said = prepared(*paths, caplog=caplog)
    assert said.count("data.normalize: log1p scales and logs them") == 1
    assert f"{paths[0]}: it holds normalised" in said and "for 5 more files" in said and str(paths[1]) in said


def test_files_normalised_to_different_sums_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths = [write_cells(tmp_path / f"{t}.h5ad", logged(counts(seed=t), 10.0**t)) for t in (4, 6)]
    said = prepared(*paths, caplog=caplog)
    assert f"different sums per cell ({paths[0]}: 10000; {paths[1]}: 1e+06)" in said


@pytest.mark.parametrize("number", [np.nan, np.inf, -1.0, 1e39])
def test_a_bad_value_far_into_the_second_file_is_named_with_its_cell(tmp_path: Path, number: float) -> None:
    cells = counts(cells=2000, genes=10).astype(np.float64)
    cells[1900, 5] = number
    first, second = tmp_path / "a.h5ad", tmp_path / "b.h5ad"
    write_cells(first, counts(genes=10))
    data = anndata.read_h5ad(write_cells(second, np.ones((2000, 10))))
    data.X = sparse.csr_matrix(cells)
    data.write_h5ad(second)
    with pytest.raises(DataError, match=r"b.h5ad: cell 1900 has a (value that is no number|negative value)"):
        prepared(first, second)


# ---------------------------------------------------------------- cells without genes, and cells that are there twice


def test_cells_without_genes_are_counted_and_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cells = random_counts(200, 20, density=0.5) + 1
    cells[::4] = 0  # 50
    cells[1::4, :5] = 0  # 50 that have none of the vocabulary
    first = write_cells(tmp_path / "a.h5ad", random_counts(50, 20) + 1)
    second = write_cells(tmp_path / "b.h5ad", cells)
    genes = tmp_path / "genes.txt"
    genes.write_text("\n".join(f"gene{i}" for i in range(5)))
    said = prepared(first, second, caplog=caplog, gene_vocab=genes)
    assert said.count("have no gene") == 1
    assert (
        f"100 of the 250 cells looked at have no gene, most of them in {second}: 50 are all zeros and 50 express no gene of the "
        "vocabulary. They are kept, and count nothing in the loss"
    ) in said
    assert "have no gene" not in prepared(first, caplog=caplog)


def test_data_without_any_gene_is_refused(tmp_path: Path) -> None:
    path = write_cells(tmp_path / "a.h5ad", np.zeros((30, 5)))
    with pytest.raises(
        DataError, match=r"none of the 30 cells looked at in .*a.h5ad has any gene \(30 are all zeros\)"
    ):
        prepared(path)


@pytest.mark.parametrize("again", ["in one file", "as another file"])
def test_cells_that_are_in_the_data_twice_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, again: str
) -> None:
    cells = counts(cells=100) + 1
    if again == "in one file":
        paths = [write_cells(tmp_path / "a.h5ad", np.vstack([cells, counts(100, seed=1) + 1, cells[:50]]))]
        number, total = 100, 250
    else:
        paths = [write_cells(tmp_path / name, cells) for name in ("a.h5ad", "b.h5ad")]
        number, total = 200, 200
    with monkeypatch.context() as patch:
        patch.setattr("shardwise.tasks.cells.task.STREAMED", 50)
        said = prepared(*paths, caplog=caplog, streaming="true")
    assert f"{number} of the {total} cells looked at are exactly the same as another one, in {paths[0]}" in said
    assert str(paths[-1]) in said
    assert "exactly the same" not in prepared(
        write_cells(tmp_path / "c.h5ad", counts(300)), caplog=caplog, streaming="true"
    )
    for streaming in ("true", "false"):
        said = prepared(*paths, caplog=caplog, streaming=streaming)
        assert "exactly the same" not in said, "that is told where all are compared with those held out"


def test_an_encoder_of_counts_does_not_embed_logged_cells(tmp_path: Path) -> None:
    values = counts(genes=30)
    path = write_cells(tmp_path / "a.h5ad", logged(values), layers={"counts": values})
    task = CellsTask(
        config_for(path, overrides=["model={hidden_dim: 16, num_layers: 1, num_heads: 2}"], layer="counts")
    )
    (tmp_path / "encoder").mkdir()
    task.export(task.build_model(), tmp_path / "encoder")
    assert embed(tmp_path / "encoder", path, layer="counts").shape == (300, 16)
    with pytest.raises(DataError, match=r"a.h5ad holds logged values .* was trained on counts. Name the layer"):
        embed(tmp_path / "encoder", path)
