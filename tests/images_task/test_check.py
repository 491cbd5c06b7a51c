"""Every image is looked at before training, once."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from shardwise.data.cache import cache_folder
from shardwise.errors import DataError
from shardwise.tasks.images import check
from shardwise.tasks.images.check import check_images
from shardwise.tasks.images.config import ImagesData
from shardwise.tasks.images.decode import Facts
from shardwise.tasks.images.pictures import Pictures
from shardwise.tasks.images.sources import load_images
from shardwise.tasks.images.synthetic import Shapes
from tests.images_task.made import RESNET, task_of, write_images
from tests.images_task.test_sources import own_hub_cache  # noqa: F401


def pictures_in(root: Path) -> Pictures:
    return load_images(ImagesData(source="folder", root=str(root)), 0, 32).train


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Every file is checked: none is held out."""
    root = tmp_path / "root"
    write_images(root / "train", {"cat": 3, "dog": 3}, ".jpg")
    write_images(root / "valid", {"cat": 1})
    return root


def test_images_that_can_be_read_pass(root: Path) -> None:
    check_images(pictures_in(root))
    (record,) = (cache_folder() / "images").iterdir()
    assert len(np.load(record)) == 6, "each was found good"


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-40])


def _replace(file: Path, content: bytes) -> None:
    file.write_bytes(content)


def _deep() -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.full((4, 4), 40000, dtype=np.uint16)).save(stream, "PNG")
    return stream.getvalue()


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (_cut, "cannot be read as an image: image file is truncated"),
        (
            lambda file: _replace(file, b"<html>404</html>"),
            "cannot be read as an image: not a kind of image that Pillow",
        ),
        (lambda file: _replace(file, b""), r"cannot be read as an image: it is empty \(0 bytes\)"),
        (lambda file: _replace(file, _deep()), r"has more than 8 bits per value \(mode I;16\); convert it"),
    ],
)
@pytest.mark.parametrize("name", ["cat/1.jpg", "dog/2.jpg"])
def test_a_file_that_is_no_whole_image_is_named(root: Path, spoil: Any, reason: str, name: str) -> None:
    spoil(root / "train" / name)
    with pytest.raises(
        DataError, match=rf"^1 of 6 images cannot be used. Replace or remove them:\n  .*{name} .*{reason}"
    ):
        check_images(pictures_in(root))


@pytest.mark.parametrize("ending", [".png", ".jpg", ".webp", ".gif", ".bmp", ".tiff"])
def test_a_truncated_file_is_found_in_every_format(tmp_path: Path, ending: str) -> None:
    root = tmp_path / "root"
    write_images(root / "train", {"cat": 2, "dog": 1}, ending)
    write_images(root / "valid", {"cat": 1})
    check_images(pictures_in(root))
    file = root / "train" / "cat" / f"1{ending}"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(DataError, match="1 of 3 images cannot be used"):
        check_images(pictures_in(root))


@pytest.mark.parametrize("held_out", ["a folder", "a share"])
def test_bad_files_to_train_on_and_held_out_are_named_together(root: Path, held_out: str) -> None:
    if held_out == "a share":
        shutil.rmtree(root / "valid")
    images = load_images(ImagesData(source="folder", root=str(root)), 0, 32)
    bad = [images.train.name(0), images.valid.name(0)]
    for name in bad:
        Path(name).write_bytes(b"nothing")
    with pytest.raises(DataError, match=rf"^2 of {7 if held_out == 'a folder' else 6} images cannot") as caught:
        task_of(RESNET, "data={}", "data.source=folder", f"data.root={root}").prepare_data()
    assert [line.split()[0] for line in str(caught.value).splitlines()[1:]] == bad


def test_many_bad_files_are_counted_and_the_first_are_named(root: Path) -> None:
    for file in (root / "train").rglob("*.jpg"):
        file.write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"^6 of 6 images cannot be used") as caught:
        check_images(pictures_in(root))
    lines = str(caught.value).splitlines()
    assert len(lines) == 7 and lines[-1] == "  and 1 more"


def test_only_new_and_changed_files_are_looked_at_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[str] = []

    def look() -> list[str]:
        looked_at.clear()
        pictures = pictures_in(root)
        original = pictures.inspect
        monkeypatch.setattr(
            pictures, "inspect", lambda index: looked_at.append(pictures.name(index)) or original(index)
        )
        with contextlib.suppress(DataError):
            check_images(pictures)
        return sorted(Path(name).name for name in looked_at)

    bad = root / "train" / "cat" / "1.jpg"
    good = bad.read_bytes()
    bad.write_bytes(b"nothing")
    assert len(look()) == 6
    assert look() == ["1.jpg"], "a bad file is looked at again, and only it"
    bad.write_bytes(good)
    assert look() == ["1.jpg"]
    assert look() == []
    os.utime(root / "train" / "dog" / "2.jpg", ns=(1, 1))
    write_images(root / "train" / "dog", {"more": 1})
    assert look() == ["0.png", "2.jpg"]


@pytest.mark.parametrize("source", ["folder", "a saved data set", "files named in rows"])
@pytest.mark.usefixtures("own_hub_cache")
def test_a_changed_file_is_looked_at_again_though_its_size_and_time_were_kept(
    root: Path, tmp_path: Path, source: str
) -> None:
    import datasets

    file = root / "train" / "cat" / "1.jpg"
    options: dict[str, Any] = {"source": "folder", "root": str(root)}
    if source != "folder":
        rows = datasets.Dataset.from_dict(
            {"image": list(map(str, sorted((root / "train").rglob("*.jpg")))), "label": [0, 1] * 3}
        )
        rows = rows.cast_column("image", datasets.Image())
        options = {"source": "hub", "dataset": str(tmp_path / "set"), "valid_split": "train"}
        if source == "a saved data set":
            rows.save_to_disk(tmp_path / "set")
            file = next((tmp_path / "set").glob("*.arrow"))
        else:
            (tmp_path / "set").mkdir()
            rows.select_columns(["image", "label"]).to_parquet(tmp_path / "set" / "train.parquet")

    def look() -> None:
        images = load_images(ImagesData.model_validate(options), 0, 32)
        check_images(images.train)

    look()
    before, content = file.stat(), file.read_bytes()
    start = content.find(b"JFIF") - 6 if source == "a saved data set" else 0
    file.write_bytes(content[:start] + bytes(20) + content[start + 20 :])
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(DataError, match=r"^1 of 6 images cannot be used"):
        look()


def test_an_interrupted_check_leaves_no_half_file_and_keeps_what_it_found(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "AT_ONCE", 2)
    pictures = pictures_in(root)
    original = pictures.inspect

    def interrupted(index: int) -> Facts:
        if index == 4:
            raise KeyboardInterrupt
        return original(index)

    monkeypatch.setattr(pictures, "inspect", interrupted)
    with pytest.raises(KeyboardInterrupt):
        check_images(pictures)
    (record,) = (cache_folder() / "images").iterdir()
    assert len(np.load(record)) == 4


def test_a_record_that_cannot_be_read_is_made_anew(root: Path) -> None:
    check_images(pictures_in(root))
    (record,) = (cache_folder() / "images").iterdir()
    record.write_bytes(b"\x93NUMPY")
    check_images(pictures_in(root))
    assert len(np.load(record)) == 6


@pytest.mark.usefixtures("own_hub_cache")
def test_a_file_named_in_a_row_that_is_gone_is_named_with_its_row(root: Path, tmp_path: Path) -> None:
    import datasets

    files = sorted((root / "train").rglob("*.jpg"))
    (tmp_path / "set").mkdir()
    rows = datasets.Dataset.from_dict({"image": list(map(str, files)), "label": [0, 1] * 3})
    rows.to_parquet(tmp_path / "set" / "train.parquet")
    files[2].unlink()
    images = load_images(ImagesData(source="hub", dataset=str(tmp_path / "set"), valid_split="train"), 0, 32)
    with pytest.raises(
        DataError,
        match=rf"set \(train\), row 2 cannot be read as an image: {files[2]} is gone, or a link that leads nowhere",
    ):
        check_images(images.train)


def test_progress_is_told_while_many_images_are_checked(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(check, "PROGRESS_SECONDS", 0.0)
    monkeypatch.setattr(check, "AT_ONCE", 4)
    with caplog.at_level(logging.INFO, "shardwise"):
        check_images(pictures_in(root))
    assert [record.getMessage() for record in caplog.records] == [
        f"checking {root}/train: 4 of 6 images are read",
        f"checking {root}/train: 6 of 6 images are read",
    ]


def test_images_made_from_the_seed_need_no_check() -> None:
    check_images(Shapes(0, 10, 5, 16))
    assert not (cache_folder() / "images").exists()


@pytest.mark.usefixtures("own_hub_cache")
def test_rows_of_a_data_set_are_checked_and_a_changed_file_is_checked_again(tmp_path: Path) -> None:
    place = write_images(tmp_path / "set" / "train", {"cat": 3, "dog": 3}, ".jpg").parent

    def look() -> None:
        images = load_images(ImagesData(source="hub", dataset=str(place), split="train", valid_split="train"), 0, 32)
        check_images(images.train)

    look()
    (place / "train" / "dog" / "0.jpg").write_bytes(b"nothing")
    with pytest.raises(
        DataError, match=r"1 of 6 images cannot be used.*\n  .*set \(train\), row 3 cannot be read as an image"
    ):
        look()


def test_the_same_pixels_packed_otherwise_are_the_same_picture(tmp_path: Path) -> None:
    root = tmp_path / "root"
    write_images(root / "train", {"cat": 2, "dog": 2})
    write_images(root / "valid", {"cat": 1})
    for ending in (".bmp", ".tiff", ".webp"):
        with Image.open(root / "train/cat/0.png") as image:
            image.save(root / f"train/cat/again{ending}", lossless=True)
    pictures = pictures_in(root)
    (checked,) = check_images(pictures)
    assert checked is not None and len(pictures) == 7
    names: dict[int, set[str]] = {}
    for index, number in enumerate(checked.contents.tolist()):
        names.setdefault(number, set()).add(Path(pictures.name(index)).name)
    assert sorted(map(len, names.values())) == [1, 1, 1, 4]
    assert {"0.png", "again.bmp", "again.tiff", "again.webp"} in names.values()


def test_images_of_one_colour_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = write_images(tmp_path / "root/train", {"cat": 4, "dog": 4}).parent
    Image.new("L", (30, 20)).save(root / "train/cat/black.png")
    with caplog.at_level(logging.WARNING, "shardwise"):
        task_of(RESNET, "data.source=folder", f"data.root={root}").prepare_data()
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith("1 of 9 images has one colour in all pixels") and "black.png, for example" in told
