"""Data sets of Hugging Face in folders: what is read of them, and what is said when they cannot be read."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import datasets
import pytest

from shardwise.data.hub import load_split
from shardwise.errors import DataError
from shardwise.tasks.chess.config import ChessData


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub-cache")


def rows(*numbers: int) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"x": list(numbers)})


def read(place: Path, split: str = "train", **options: Any) -> list[int]:
    return list(load_split(str(place), split, extra="images", **options)["x"])


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    parts = {"train": rows(*range(10)), "test": rows(20, 21)}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "set")
    return tmp_path / "set"


# ---------------------------------------------------------------- folders that save_to_disk has written


@pytest.mark.parametrize("dictionary", ["with", "without"])
def test_a_saved_data_set_is_read_by_its_splits_and_parts_of_them(saved: Path, dictionary: str) -> None:
    if dictionary == "without":  # each split was saved by itself
        (saved / "dataset_dict.json").unlink()
    assert read(saved) == [*range(10)]
    assert read(saved, "test") == [20, 21]
    assert read(saved, "train[:20%]+test[-1:]") == [0, 1, 21]
    assert sorted(read(saved, "all")) == [*range(10), 20, 21]


def test_a_saved_data_set_without_splits_is_the_split_train(tmp_path: Path) -> None:
    rows(1, 2, 3).save_to_disk(tmp_path / "set")
    assert read(tmp_path / "set") == [1, 2, 3]
    with pytest.raises(DataError, match=r"^data.dataset: '.*/set' has no split 'test'; it has train$"):
        read(tmp_path / "set", "test")


def test_what_was_once_computed_of_saved_rows_is_not_read_with_them(saved: Path) -> None:
    loaded = datasets.load_from_disk(str(saved))
    loaded["train"].map(lambda row: {"x": -row["x"]})
    assert list((saved / "train").glob("cache-*.arrow")), "`datasets` keeps it beside the rows"
    assert read(saved) == [*range(10)]


def test_a_format_that_was_saved_makes_no_tensors_of_the_rows(tmp_path: Path) -> None:
    rows(1, 2).with_format("numpy").save_to_disk(tmp_path / "set")
    assert [type(each) for each in read(tmp_path / "set")] == [int, int]


def test_the_fingerprint_changes_with_a_saved_file(saved: Path) -> None:
    before = [load_split(str(saved), split, extra="lm")._fingerprint for split in ("train", "train", "train[:5]")]
    assert before[0] == before[1] != before[2]
    (file,) = (saved / "train").glob("*.arrow")
    times = file.stat()
    file.write_bytes(file.read_bytes())
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert load_split(str(saved), "train", extra="lm")._fingerprint != before[0]


# ---------------------------------------------------------------- what cannot be read


def test_a_saved_file_that_is_missing_or_cut_off_is_named(saved: Path) -> None:
    (file,) = (saved / "train").glob("*.arrow")
    file.write_bytes(file.read_bytes()[:-120])
    with pytest.raises(DataError, match=rf"^data.dataset: {file} is damaged or cut off \(.*\): copy it again$"):
        read(saved)
    file.unlink()
    with pytest.raises(
        DataError, match=rf"^data.dataset: {file} is not there, and .*/train/state.json says .*: copy the"
    ):
        read(saved)
    assert read(saved, "test") == [20, 21], "the other split is whole"


@pytest.mark.parametrize("way", ["saved", "parquet", "sliced"])
def test_no_rows_are_an_error(tmp_path: Path, saved: Path, way: str) -> None:
    place = saved if way == "sliced" else tmp_path / "empty"
    if way == "saved":
        datasets.DatasetDict(train=rows()).save_to_disk(place)
    elif way == "parquet":
        place.mkdir()
        rows().to_parquet(place / "train.parquet")
    with pytest.raises(DataError, match=r"^data.dataset: .* has no rows$"):
        read(place, "train[5:5]" if way == "sliced" else "train")


@pytest.mark.parametrize("way", ["saved", "parquet"])
@pytest.mark.parametrize("split", ["trian", "train+tset", "validation[:50%]"])
def test_a_split_that_is_not_there_is_an_error_that_names_those_that_are(
    tmp_path: Path, saved: Path, way: str, split: str
) -> None:
    place = saved
    if way == "parquet":
        place = tmp_path / "files"
        place.mkdir()
        for name in ("train", "test"):
            rows(1, 2).to_parquet(place / f"{name}.parquet")
        assert read(place, "train[:1]") == [1]
    with pytest.raises(DataError) as caught:
        read(place, split)
    assert str(caught.value).startswith(f"data.dataset: {str(place)!r} has no split {split!r}; it has t")
    assert {"train", "test"} == set(str(caught.value).rpartition("it has ")[2].split(", "))


@pytest.mark.parametrize("content", [b"nothing", b"PAR1 nothing"])
def test_a_file_that_cannot_be_read_is_named_in_the_error_and_nowhere_else(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    caplog.set_level(logging.DEBUG)
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.parquet").write_bytes(content)
    with pytest.raises(DataError, match=r"^data.dataset: '.*' \(split 'train'\) cannot be read: .*/set/train.parquet"):
        read(tmp_path / "set")
    assert "train.parquet" not in "".join(capfd.readouterr()) + caplog.text
    assert logging.getLogger("datasets").handlers, "its own handlers are back"


def test_what_is_no_folder_is_said(tmp_path: Path) -> None:
    file = tmp_path / "train.json"
    file.write_text(json.dumps({"x": 1}))
    with pytest.raises(DataError, match=r"train.json' \(split 'train'\) is a file: name the folder that it lies in"):
        read(file)
    for name in (tmp_path / "nothing", "./nothing", "../nothing", "data/of/mine"):
        with pytest.raises(DataError) as caught:
            load_split(str(name), "train", extra="images")
        assert str(caught.value) == (
            f"data.dataset: {str(name)!r} (split 'train') is neither a folder (looked for from {Path.cwd()}) nor a name on the "
            "hub: those look like owner/name"
        )


def test_the_home_folder_can_be_written_as_a_tilde(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert ChessData(source="hub", dataset="~/games").dataset == "/home/somebody/games"
    assert ChessData(source="hub", dataset="owner/games").dataset == "owner/games"


# ---------------------------------------------------------------- classes


def declaring(*names: str) -> datasets.Dataset:
    features = datasets.Features({"x": datasets.ClassLabel(names=list(names))})
    return datasets.Dataset.from_dict({"x": [0, 1]}, features=features)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize("second", ["test-0", "train-1"])
def test_files_that_number_the_classes_differently_are_an_error(tmp_path: Path, kind: str, second: str) -> None:
    place = tmp_path / "set"
    place.mkdir()
    for name, classes in (("train-0", ("cat", "dog")), (second, ("dog", "cat"))):
        if kind == "parquet":
            declaring(*classes).to_parquet(place / f"{name}.parquet")
        else:
            declaring(*classes).save_to_disk(tmp_path / name)
            (file,) = (tmp_path / name).glob("*.arrow")
            file.rename(place / f"{name}.arrow")
    split = second.partition("-")[0]
    with pytest.raises(
        DataError,
        match=rf"^data.label_column: in .*/{second}.{kind} the numbers of 'x' stand for dog, cat, and in other files .* cat, dog",
    ):
        read(place, split, classes_of="x")
    assert len(read(place, split)) == (2 if split == "test" else 4), "where nobody asks for classes"
    if split == "test":
        assert len(read(place, "train", classes_of="x")) == 2
