"""Folders as people have them: with other names, links, and what systems leave in them."""

from __future__ import annotations

import logging
import os
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from shardwise.errors import DataError
from shardwise.tasks.images import folder as module
from shardwise.tasks.images.check import check_images
from shardwise.tasks.images.config import ImagesData
from shardwise.tasks.images.pictures import ImageData
from shardwise.tasks.images.sources import load_images
from tests.images_task.made import write_images


def load(root: Path, **options: Any) -> ImageData:
    return load_images(ImagesData(source="folder", root=str(root), **options), 0, 32)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_images(tmp_path / "root" / "train", {"cat": 4, "dog": 4}).parent


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level(logging.INFO, "shardwise")
    return lambda: [record.getMessage() for record in caplog.records]


# ---------------------------------------------------------------- which folder is validated on


@pytest.mark.parametrize("name", ["valid", "val", "validation", "Validation", "VAL"])
def test_each_usual_name_of_the_validation_folder_is_taken(root: Path, name: str, said: Any) -> None:
    write_images(root / name, {"cat": 2, "dog": 1})
    images = load(root)
    assert (len(images.train), len(images.valid), images.held_out) == (8, 3, False)
    assert said() == []


def test_a_training_folder_in_capitals_is_taken(root: Path) -> None:
    (root / "train").rename(root / "Train")
    assert len(load(root).train) + len(load(root).valid) == 8


@pytest.mark.parametrize("names", [("val", "valid"), ("valid", "validation"), ("val", "Val")])
def test_two_validation_folders_are_an_error(root: Path, names: tuple[str, str]) -> None:
    for name in names:
        write_images(root / name, {"cat": 1, "dog": 1})
    first, second = sorted(names)
    with pytest.raises(DataError, match=rf"has {first} and {second}, and only one of them can be the validation data"):
        load(root)


@pytest.mark.parametrize("kind", ["a link that leads nowhere", "a file"])
def test_a_validation_folder_that_is_none_is_an_error(root: Path, kind: str) -> None:
    if kind == "a file":
        (root / "valid").write_text("")
    else:
        (root / "valid").symlink_to(root / "not mounted")
    with pytest.raises(DataError, match="root/valid is not a folder, or a link that leads nowhere: mend or remove it"):
        load(root)


def test_another_folder_beside_train_is_mentioned_where_there_is_no_validation_folder(root: Path, said: Any) -> None:
    write_images(root / "test", {"cat": 1, "dog": 1})
    (root / "runs" / "images").mkdir(parents=True)  # which has nothing to do with it
    assert load(root).held_out
    (line,) = said()
    assert line == (
        f"{root}: test beside train is not read; 10% of every class of train is held out for validation. A folder named valid "
        "would be validated on instead"
    )
    write_images(root / "valid", {"cat": 1, "dog": 1})
    load(root)
    assert len(said()) == 1, "with a validation folder, test is what it says"


# ---------------------------------------------------------------- names of classes

COMPOSED, DECOMPOSED = (unicodedata.normalize(form, "Müller") for form in ("NFC", "NFD"))


def test_a_name_with_an_accent_is_one_class_in_either_way_to_write_it(root: Path, said: Any) -> None:
    write_images(root / "train", {COMPOSED: 2, DECOMPOSED: 3})
    write_images(root / "valid", {"cat": 1, DECOMPOSED: 1})
    for options in ({}, {"classes": ["cat", "dog", DECOMPOSED]}):
        images = load(root, **options)
        assert images.classes == options.get("classes", [COMPOSED, "cat", "dog"])
        number = [unicodedata.normalize("NFC", name) for name in images.classes].index(COMPOSED)
        assert images.train.labels.tolist().count(number) == 5
        assert number in images.valid.labels.tolist()
    assert said() == []
    with pytest.raises(ValueError, match="classes has a name twice"):
        ImagesData(source="folder", root="x", classes=[COMPOSED, DECOMPOSED])


# ---------------------------------------------------------------- what lies in the folders


def test_what_systems_leave_is_neither_trained_on_nor_mentioned(root: Path, said: Any) -> None:
    for folder in (".ipynb_checkpoints", "@eaDir", "__MACOSX"):
        write_images(root / "train" / "cat" / folder, {"copies": 3})
    for folder in ("__MACOSX", ".cache"):
        write_images(root / "train" / folder, {"x": 1})
    for name in (".DS_Store", "Thumbs.db", "desktop.ini", "._0.png"):
        (root / "train" / "cat" / name).write_bytes(b"\x00")
    images = load(root)
    assert len(images.train) + len(images.valid) == 8 and images.classes == ["cat", "dog"]
    assert said() == []


def test_images_in_no_class_folder_are_mentioned(root: Path, said: Any) -> None:
    for name in ("b.jpg", "a.PNG"):
        Image.new("RGB", (9, 9)).save(root / "train" / name)
    load(root)
    assert said() == [f"{root}/train: 2 images lie in no class folder and are left out, a.PNG first: put them into one"]


def test_images_of_kinds_that_are_not_read_are_told_apart_from_other_files(root: Path, said: Any) -> None:
    for name in ("cat/1.HEIC", "dog/2.heic", "dog/3.cr2", "dog/labels.csv"):
        (root / "train" / name).write_bytes(b"\x00")
    load(root)
    assert said() == [
        f"{root}/train: 3 files are of kinds that are not read, and are left out: {root}/train/cat/1.HEIC for example. Convert "
        "them to PNG or JPEG to train on them",
        f"{root}/train: 1 files do not end as images do and are left out, labels.csv first",
    ]


@pytest.mark.parametrize("name", ["photo", "photo.jpg_large", "photo.2024"])
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "TIFF"])
def test_images_that_do_not_end_as_such_are_counted_in_a_warning(root: Path, name: str, kind: str, said: Any) -> None:
    for folder in ("cat", "dog"):
        Image.new("RGB", (9, 9)).save(root / "train" / folder / name, kind)
        (root / "train" / folder / "LICENSE").write_text("You may look at the cats.")
    load(root)
    assert said() == [
        f"{root}/train: 2 files hold images, but do not end as images do, and are left out: {root}/train/cat/{name} for example. "
        "Rename them, to .jpg for example, to train on them",
        f"{root}/train: 2 files do not end as images do and are left out, LICENSE first",
    ]


def test_of_many_files_of_one_ending_some_are_looked_at(root: Path, monkeypatch: pytest.MonkeyPatch, said: Any) -> None:
    monkeypatch.setattr(module, "LOOKED_AT", 3)
    opened: list[str] = []
    original = Image.open

    def open_image(file: Any, *args: Any, **options: Any) -> Any:
        opened.append(Path(file).suffix)
        return original(file, *args, **options)

    monkeypatch.setattr(Image, "open", open_image)
    for number in range(5):
        (root / "train" / "cat" / f"{number}.txt").write_text("a cat")
        (root / "train" / "cat" / f"{number}").write_text("a cat")
    os.mkfifo(root / "train" / "dog" / "pipe")
    load(root)
    assert sorted(opened) == [""] * 5 + [".txt"] * 3


@pytest.mark.parametrize("ending", [".JPG", ".Jpeg", ".jfif", ".jpe", ".TIFF", ".PGM"])
def test_endings_of_images_are_known_in_capitals_too(root: Path, ending: str) -> None:
    (root / "train" / "cat" / "0.png").rename(root / "train" / "cat" / f"0{ending}")
    images = load(root)
    assert len(images.train) + len(images.valid) == 8
    check_images(images.train, images.valid)


def test_links_to_files_and_folders_are_followed(root: Path, tmp_path: Path) -> None:
    write_images(tmp_path / "elsewhere", {"more": 2})
    (root / "train" / "cat" / "linked").symlink_to(tmp_path / "elsewhere")
    (root / "train" / "dog" / "linked.png").symlink_to(tmp_path / "elsewhere" / "more" / "0.png")
    images = load(root)
    assert sorted([*images.train.labels, *images.valid.labels]) == [0] * 6 + [1] * 5


@pytest.mark.parametrize("target", ["train/cat", "train", "."])
def test_a_link_back_to_a_folder_above_is_an_error_and_not_read_forty_times(root: Path, target: str) -> None:
    (root / "train" / "cat" / "again").symlink_to(root / target)
    with pytest.raises(
        DataError, match=r"cat is a link to a folder that it lies in|again is a link to a folder that it"
    ):
        load(root)


def test_a_folder_that_may_not_be_read_is_an_error_and_not_left_out(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = os.scandir

    def scandir(path: Any) -> Any:
        if str(path).endswith("cat"):
            raise PermissionError(13, "Permission denied", str(path))
        return original(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(DataError, match=r"train/cat cannot be read: Permission denied. Its images would be left out"):
        load(root)


def test_a_link_that_leads_nowhere_and_a_pipe_are_named_with_the_other_bad_files(root: Path) -> None:
    write_images(root / "valid", {"cat": 1, "dog": 1})
    (root / "train" / "cat" / "gone.png").symlink_to(root / "nothing.png")
    os.mkfifo(root / "train" / "dog" / "pipe.jpg")
    with pytest.raises(DataError, match=r"^2 of 12 images cannot be used") as caught:
        images = load(root)
        check_images(images.train, images.valid)
    assert "cat/gone.png cannot be read as an image: it is gone, or a link that leads nowhere" in str(caught.value)
    assert "dog/pipe.jpg cannot be read as an image: it is not a file but a pipe" in str(caught.value)
