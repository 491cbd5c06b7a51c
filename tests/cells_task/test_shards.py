"""A sharded copy: the same cells in a random order, whole or not there, the held-out ones apart."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import anndata
import numpy as np
import pytest

from shardwise.cli import main
from shardwise.data.manifest import FileEntry, problems_of, read_manifest, write_manifest
from shardwise.errors import ConfigError, DataError
from shardwise.tasks.cells import sharding, sources
from shardwise.tasks.cells.corpus import open_corpus
from shardwise.tasks.cells.sharding import shard_cells
from shardwise.tasks.cells.shards import open_shards, write_shard
from shardwise.tasks.cells.task import CellsTask
from shardwise.watch.run_folder import dump_config
from tests.cells_task.files import random_counts, write_cells
from tests.cells_task.test_h5ad import config_for, dense
from tests.tasks import config_of

CELLS, GENES = 1000, 12


@pytest.fixture
def source(tmp_path: Path) -> Any:
    counts = random_counts(CELLS, GENES)
    labels = ["T" if cell % 3 else "B" for cell in range(CELLS)]
    return config_for(write_cells(tmp_path / "a.h5ad", counts, labels=labels), valid_fraction=0.1)


def copied(config: Any, folder: Path, cells_per_shard: int = 300) -> Any:
    return open_shards(shard_cells(config.data, config.seed, folder, cells_per_shard=cells_per_shard))


def test_a_copy_has_every_cell_once_with_its_values_and_label(source: Any, tmp_path: Path) -> None:
    copy, corpus = copied(source, tmp_path / "copy"), open_corpus(source.data, source.seed)
    table = dense(corpus.training, GENES)
    labels = corpus.training.labels()
    assert labels is not None
    codes, names = labels
    seen: list[int] = []
    for part in (copy.training, copy.validation):
        numbers = part.numbers(np.arange(len(part)))
        seen += numbers.tolist()
        assert (dense(part, GENES) == table[numbers]).all()
        its_codes, its_names = part.labels()
        assert [its_names[code] for code in its_codes] == [names[code] for code in codes[numbers]]
    assert sorted(seen) == list(range(CELLS))
    assert len(copy.training.files) == 3 and copy.counts and copy.genes == list(corpus.genes)


def test_the_cells_held_out_are_those_of_the_config(source: Any, tmp_path: Path) -> None:
    copy = copied(source, tmp_path / "copy")
    assert copy.validation.numbers(np.arange(100)).tolist() == open_corpus(source.data, source.seed).held_out.tolist()


def test_the_order_is_random_over_the_whole_file_and_follows_from_the_seed(source: Any, tmp_path: Path) -> None:
    copy = copied(source, tmp_path / "copy")
    numbers = copy.training.numbers(np.arange(len(copy.training)))
    assert abs(np.corrcoef(numbers, np.arange(len(numbers)))[0, 1]) < 0.1
    assert (np.abs(np.diff(numbers)) == 1).mean() < 0.01
    again = copied(source, tmp_path / "again")
    assert (again.training.numbers(np.arange(len(numbers))) == numbers).all()


def test_small_counts_are_stored_in_two_bytes_and_others_exactly(tmp_path: Path) -> None:
    for name, values, kind in (("counts", random_counts(50, 5), "u"), ("logged", random_counts(50, 5) * 0.37, "f")):
        config = config_for(write_cells(tmp_path / f"{name}.h5ad", values))
        copy = copied(config, tmp_path / name)
        assert copy.training.read(0, 10).values.dtype.kind == kind
        numbers = copy.training.numbers(np.arange(len(copy.training)))
        assert (dense(copy.training, 5) == np.asarray(values, np.float32)[numbers]).all()


@pytest.mark.parametrize("streaming", ["true", "false"])
def test_training_from_a_copy_gives_a_cell_the_tokens_it_has_in_the_file(
    source: Any, tmp_path: Path, streaming: str
) -> None:
    copied(source, tmp_path / "copy")
    text = f"task: cells\ndata: {{source: shards, paths: [{tmp_path / 'copy'}], streaming: {streaming}}}"
    tasks = [CellsTask(source), CellsTask(config_of(text))]
    rows = [_tokens(task.train_data()) for task in tasks]
    assert rows[0] == rows[1] and len(rows[0]) == 900
    assert _tokens(tasks[0].valid_data()) == _tokens(tasks[1].valid_data())


def _tokens(data: Any) -> dict[int, Any]:
    batch = data.read(np.arange(len(data)), 0)
    return {
        cell: ([gene for gene in genes if gene], [target for target in targets if target >= 0])
        for cell, genes, targets in zip(
            batch["cells"].tolist(), batch["genes"].tolist(), batch["targets"].tolist(), strict=True
        )
    }


def from_copy(folder: Path, *overrides: str) -> Any:
    return config_of(f"task: cells\ndata: {{source: shards, paths: [{folder}]}}", list(overrides))


@pytest.mark.parametrize(
    ("wish", "made"),
    [
        ("layer=spliced", "layer: null"),
        ("gene_vocab=genes.txt", "gene_vocab: null"),
        ("gene_key=symbol", "gene_key: null"),
        ("label_key=tissue", "label_key: null"),
        ("valid_fraction=0.05", "valid_fraction: 0.1"),
        ("max_valid_cells=50", "max_valid_cells: 10000"),
    ],
)
def test_a_key_that_the_copy_has_fixed_is_refused_where_it_says_otherwise(
    source: Any, tmp_path: Path, wish: str, made: str
) -> None:
    copied(source, tmp_path / "copy")
    key = wish.partition("=")[0]
    with pytest.raises(ConfigError) as refused:
        CellsTask(from_copy(tmp_path / "copy", f"data.{wish}")).prepare_data()
    message = str(refused.value)
    assert f"the sharded copy {tmp_path / 'copy'} was made with {made}, and has that fixed, but" in message
    assert f"Leave {key} out, or make another copy from the h5ad files:  " in message
    assert message.endswith("data shard CONFIG --to FOLDER")


def test_the_config_that_a_copy_was_made_from_trains_from_it(source: Any, tmp_path: Path) -> None:
    copied(source, tmp_path / "copy")
    assert "valid_fraction" in source.data.model_fields_set
    CellsTask(from_copy(tmp_path / "copy", "data.valid_fraction=0.1", "data.label_key=null")).prepare_data()


def test_the_config_that_a_run_writes_down_can_be_used_again(source: Any, tmp_path: Path) -> None:
    """It has every default written out: those that the copy does not have must not read as wishes."""
    copied(source, tmp_path / "copy")
    written = dump_config(from_copy(tmp_path / "copy", "data.max_valid_cells=10000"))
    again = config_of(written)
    assert "valid_fraction" not in written and "max_valid_cells: 10000" in written and "target_sum: 10000.0" in written
    assert len(CellsTask(again).valid_data()) == 100
    assert dump_config(again) == written
    assert "valid_fraction: 0.1" in dump_config(source)


def test_another_seed_than_that_of_the_copy_is_said(
    source: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copied(source, tmp_path / "copy")
    with caplog.at_level("INFO", "shardwise"):
        CellsTask(from_copy(tmp_path / "copy")).prepare_data()
        assert "was made with seed" not in caplog.text
        CellsTask(from_copy(tmp_path / "copy", "seed=3")).prepare_data()
    assert "copy was made with seed 0, which chose the cells held out; all else follows 3" in caplog.text


@pytest.mark.parametrize("moment", ["_scatter", "write_shard", "write_manifest"])
def test_a_copy_that_fails_leaves_nothing(
    source: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError("no space left on device")

    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr(sharding, moment, fail)
    with pytest.raises(DataError, match=r"the copy could not be written to .*copy: no space left"):
        copied(source, tmp_path / "copy")
    assert sorted(tmp_path.iterdir()) == before


def test_every_byte_of_a_copy_is_guarded(source: Any, tmp_path: Path) -> None:
    copied(source, tmp_path / "copy")
    assert problems_of(tmp_path / "copy") == []
    for name in read_manifest(tmp_path / "copy")["files"]:
        file = tmp_path / "copy" / name
        content = file.read_bytes()
        file.write_bytes(content[:-20] + bytes([content[-20] ^ 1]) + content[-19:])
        assert problems_of(tmp_path / "copy") == [f"{name} has changed: its checksum does not match"]
        file.write_bytes(content[:-1])
        with pytest.raises(DataError, match=f"not a whole sharded copy: {name} has"):
            open_shards(tmp_path / "copy")
        file.write_bytes(content)


def test_a_copy_with_changed_bytes_is_an_error_that_names_the_file_and_the_command(source: Any, tmp_path: Path) -> None:
    """Whatever byte it is: sizes are as the manifest says, and nothing else is compared before training."""
    folder = copied(source, tmp_path / "copy", cells_per_shard=1000).training.files[0].parent
    rng = np.random.default_rng(0)
    found = set()
    for name in ("train-00000.arrow", "valid-00000.arrow"):
        file = folder / name
        content = file.read_bytes()
        for place in rng.integers(0, len(content), 150).tolist():
            file.write_bytes(content[:place] + bytes([content[place] ^ 255]) + content[place + 1 :])
            try:
                corpus = open_corpus(from_copy(folder).data, 0)
                corpus.training.read(0, len(corpus.training))
                corpus.validation_cells()
            except DataError as error:
                assert f"{file} " in str(error) and f"data verify {folder}" in str(error)
                found.add("is damaged" in str(error))
        file.write_bytes(content)
    assert found == {True, False}, "numbers that no cell can have, and files that are no Arrow files any more"


@pytest.mark.parametrize("column", ["genes", "values", "starts", "labels"])
def test_numbers_that_no_cell_can_have_are_an_error(source: Any, tmp_path: Path, column: str) -> None:
    copy = copied(source, tmp_path / "copy")
    shard = copy.training._opened(1)
    wrong = {"genes": GENES, "values": np.nan, "starts": 2**30, "labels": 7}[column]
    array = getattr(shard, column).astype(np.float32 if column == "values" else np.int64)
    array[40] = wrong
    copy.training._open[1] = dataclasses.replace(shard, **{column: array})
    with pytest.raises(
        DataError, match=r"train-00001.arrow is damaged: .* Which files are whole:  .*data verify .*copy$"
    ):
        copy.training.labels() if column == "labels" else copy.training.read(300, 400)


def test_a_bad_value_is_told_and_no_copy_is_made(tmp_path: Path) -> None:
    counts = random_counts(50, 5).astype(np.float32)
    counts[33, 0] = np.inf
    config = config_for(write_cells(tmp_path / "a.h5ad", counts))
    with pytest.raises(DataError, match=r"a.h5ad: cell 33 has a value that is no number"):
        copied(config, tmp_path / "copy")
    assert [file.name for file in tmp_path.iterdir()] == ["a.h5ad"]


def test_the_program_writes_and_verifies_a_copy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_cells(tmp_path / "a.h5ad", random_counts(200, 8))
    config = tmp_path / "cells.yaml"
    config.write_text(f"task: cells\ndata: {{source: local, paths: [{path}]}}\n")
    copy = tmp_path / "copy"
    assert main(["data", "shard", str(config), "--to", str(copy), "--cells-per-shard", "100"]) == 0
    assert "190 cells to train on in 2 shards, 10 held out" in capsys.readouterr().out
    assert main(["data", "verify", str(copy)]) == 0
    assert "3 files" in capsys.readouterr().out
    assert main(["data", "shard", str(config), "--to", str(copy)]) == 2
    assert "is there already and not empty" in capsys.readouterr().err
    (copy / "train-00000.arrow").unlink()
    assert main(["data", "verify", str(copy)]) == 2
    assert "train-00000.arrow is missing" in capsys.readouterr().err
    assert (
        main(["data", "shard", str(config), "--to", str(tmp_path / "x"), "--set", "task=chess", "--set", "data={}"])
        == 2
    )
    assert "has task: chess" in capsys.readouterr().err


# ---------------------------------------------------------------- what has changed since


def prepare(folder: Path, caplog: pytest.LogCaptureFixture, *overrides: str) -> str:
    caplog.clear()
    with caplog.at_level("INFO", "shardwise"):
        CellsTask(from_copy(folder, *overrides)).prepare_data()
    return caplog.text


def rewritten(change: str, path: Path) -> None:
    """The file as somebody else may have left it."""
    about, content = path.stat(), path.read_bytes()
    if change == "size":
        path.write_bytes(content + b"x")
    elif change == "content":
        write_cells(path, random_counts(CELLS, GENES, seed=1), labels=["T"] * CELLS)
    else:  # one byte, and the old modification time
        middle = len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
        os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))


@pytest.mark.parametrize("change", ["size", "content", "one byte"])
def test_a_copy_of_a_file_that_has_changed_since_is_refused(
    source: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, change: str
) -> None:
    copied(source, tmp_path / "copy")
    assert "since" not in prepare(tmp_path / "copy", caplog)
    rewritten(change, tmp_path / "a.h5ad")
    with pytest.raises(
        DataError, match=r"was made from files that have changed since: .*a.h5ad has .* data.changed_sources"
    ):
        prepare(tmp_path / "copy", caplog)
    said = prepare(tmp_path / "copy", caplog, "data.changed_sources=warn")
    assert said.count("have changed since") == 1 and "WARNING" in said and "It is trained on as it was made" in said


def test_a_file_that_was_only_touched_is_told(source: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    copied(source, tmp_path / "copy")
    os.utime(tmp_path / "a.h5ad")
    said = prepare(tmp_path / "copy", caplog)
    assert (
        f"{tmp_path / 'a.h5ad'}: written again since the sharded copy {tmp_path / 'copy'} was made, with the same size"
        in said
    )


def test_a_source_that_was_moved_away_is_told_and_the_copy_used(
    source: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copied(source, tmp_path / "copy")
    (tmp_path / "a.h5ad").rename(tmp_path / "elsewhere.h5ad")
    assert f"was made from {tmp_path / 'a.h5ad'}, which is not there any more" in prepare(tmp_path / "copy", caplog)


def test_a_vocabulary_and_a_zarr_store_are_sources_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = anndata.read_h5ad(write_cells(tmp_path / "a.h5ad", random_counts(60, 8)))
    data.write_zarr(tmp_path / "a.zarr")
    genes = tmp_path / "genes.txt"
    genes.write_text("\n".join(f"gene{i}" for i in range(8)))
    copied(config_for(tmp_path / "a.zarr", gene_vocab=genes), tmp_path / "copy")
    assert "since" not in prepare(tmp_path / "copy", caplog)
    genes.write_text("\n".join(f"gene{i}" for i in reversed(range(8))))
    with pytest.raises(DataError, match=r"changed since: .*genes.txt has another content of the same size"):
        prepare(tmp_path / "copy", caplog)
    genes.unlink()
    chunk = max((tmp_path / "a.zarr" / "X" / "data").rglob("*"), key=lambda file: file.stat().st_size * file.is_file())
    chunk.write_bytes(chunk.read_bytes()[:-1] + b"x")
    with pytest.raises(DataError, match=r"changed since: .*a.zarr has another content of the same size"):
        prepare(tmp_path / "copy", caplog)


def test_of_a_large_file_blocks_from_all_over_it_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "BLOCK", 10)
    monkeypatch.setattr(sources, "MOST_BLOCKS", 20)
    path = tmp_path / "large"
    content = np.random.default_rng(0).bytes(1003)
    path.write_bytes(content)
    before = sources.Source.of(path)
    noticed = 0
    for place in range(0, 1003, 10):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        noticed += sources.Source.of(path).content != before.content
    assert noticed == 20
    for place in (0, 1002):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        assert sources.Source.of(path).content != before.content


def test_a_file_that_changes_while_it_is_copied_gives_no_copy(
    source: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change_and_write(*args: Any) -> None:
        os.utime(tmp_path / "a.h5ad")
        write_shard(*args)

    monkeypatch.setattr(sharding, "write_shard", change_and_write)
    with pytest.raises(DataError, match=r"a.h5ad: changed while it was copied"):
        copied(source, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize(("made", "message"), [(None, "an older"), (1, "an older"), (99, "a newer")])
def test_a_copy_by_another_version_with_another_format_is_refused(
    source: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], made: int | None, message: str
) -> None:
    copied(source, tmp_path / "copy")
    rewrite_manifest(tmp_path / "copy", format=made)
    with pytest.raises(
        DataError,
        match=rf"copy was made by {message} version of shardwise .* Make it anew:  .*shardwise data shard CONFIG",
    ):
        open_shards(tmp_path / "copy")
    assert main(["data", "verify", str(tmp_path / "copy")]) == 2
    assert f"was made by {message} version of shardwise" in capsys.readouterr().err


def rewrite_manifest(folder: Path, **about: Any) -> None:
    """As another version would have written it; None: that did not write the key."""
    manifest = read_manifest(folder)
    files = {name: FileEntry(**entry) for name, entry in manifest["files"].items()}
    changed = {key: value for key, value in (manifest["about"] | about).items() if value is not None}
    write_manifest(folder, files, changed)


def test_a_copy_by_another_version_with_the_same_format_is_told(
    source: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copied(source, tmp_path / "copy")
    assert "was made by shardwise" not in prepare(tmp_path / "copy", caplog)
    rewrite_manifest(tmp_path / "copy", shardwise="0.0.7")
    assert "was made by shardwise 0.0.7; this is" in prepare(tmp_path / "copy", caplog)


def test_verify_tells_changed_sources(source: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copied(source, tmp_path / "copy")
    rewritten("one byte", tmp_path / "a.h5ad")
    assert main(["data", "verify", str(tmp_path / "copy")]) == 2
    assert "is whole, but was made from files that have changed since" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["../a.h5ad", "train-00009.arrow"])
def test_a_shard_that_the_manifest_does_not_list_is_never_read(source: Any, tmp_path: Path, name: str) -> None:
    copied(source, tmp_path / "copy")
    shards = read_manifest(tmp_path / "copy")["about"]["shards"]
    rewrite_manifest(tmp_path / "copy", shards={**shards, "train": {**shards["train"], name: 5}})
    with pytest.raises(DataError, match=f"is not a whole sharded copy: its manifest does not list '{name}'"):
        open_shards(tmp_path / "copy")


def test_a_file_in_place_of_a_copy_is_said_so(tmp_path: Path) -> None:
    path = write_cells(tmp_path / "a.h5ad", random_counts(5, 5))
    with pytest.raises(DataError, match=r"a.h5ad is a file, and source: shards reads a folder"):
        open_shards(path)


def test_a_folder_that_is_no_copy_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no folder .*none. .*data shard CONFIG --to .*none$"):
        open_shards(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="there is no manifest, so it was never finished"):
        open_shards(tmp_path / "empty")
