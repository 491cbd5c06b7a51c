"""Where images come from, and what is said when they cannot be used."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwise.errors import DataError
from shardwise.tasks.images.config import ImagesData
from shardwise.tasks.images.pictures import ImageData, Subset, held_out
from shardwise.tasks.images.sources import load_images
from shardwise.tasks.images.synthetic import Shapes
from tests.images_task.made import write_images


def load(seed: int = 0, **options: Any) -> ImageData:
    return load_images(ImagesData(**options), seed, 32)


def folder(root: Path, **options: Any) -> ImageData:
    return load(source="folder", root=str(root), **options)


# ---------------------------------------------------------------- synthetic


def test_a_synthetic_image_follows_from_seed_and_index_alone() -> None:
    def pixels(seed: int, number: int, index: int) -> np.ndarray:
        return np.asarray(Shapes(seed, number, 10, 32).open(index))

    assert pixels(1, 20, 7).shape == (32, 32, 3)
    assert np.array_equal(pixels(1, 20, 7), pixels(1, 500, 7))
    assert not np.array_equal(pixels(1, 20, 7), pixels(2, 20, 7))
    assert not np.array_equal(pixels(1, 20, 7), pixels(1, 20, 17)), "two images of one class"


def test_every_synthetic_class_has_its_own_name_and_as_many_images() -> None:
    shapes = Shapes(0, 130, 13, 16)
    assert len(set(shapes.classes)) == 13
    assert set(Counter(shapes.labels.tolist()).values()) == {10}


# ---------------------------------------------------------------- what is held out


def test_the_same_share_of_every_class_is_held_out_and_no_image_is_in_both() -> None:
    labels = np.array([0] * 50 + [1] * 20 + [2] * 3 + [3])
    train, valid = held_out(labels, 0.1, seed=3)
    assert Counter(labels[valid].tolist()) == {0: 5, 1: 2, 2: 1}, "the only image of class 3 is for training"
    assert sorted([*train, *valid]) == list(range(74))
    assert valid.tolist() == held_out(labels, 0.1, seed=3)[1].tolist()
    assert valid.tolist() != held_out(labels, 0.1, seed=4)[1].tolist()


def test_where_no_class_has_two_images_none_can_be_held_out(tmp_path: Path) -> None:
    write_images(tmp_path / "train", {"cat": 1, "dog": 1})
    with pytest.raises(DataError, match="no class has two images, so none can be held out for validation: add images"):
        folder(tmp_path)


# ---------------------------------------------------------------- folder


@pytest.mark.parametrize("name", ["valid", "val"])
def test_a_folder_per_class_is_read_with_its_validation_images(tmp_path: Path, name: str) -> None:
    write_images(tmp_path / "train", {"dog": 3, "cat": 2})
    write_images(tmp_path / name, {"dog": 1}, ".jpg")
    (tmp_path / "train" / "cat" / ".DS_Store").write_text("")
    images = folder(tmp_path)
    assert images.classes == ["cat", "dog"]
    assert images.train.labels.tolist() == [0, 0, 1, 1, 1]
    assert images.valid.labels.tolist() == [1]
    assert images.train.name(0) == str(tmp_path / "train" / "cat" / "0.png")
    assert images.train.open(0).size == (24, 20) and images.train.open(0).mode == "RGB"


def test_without_a_validation_folder_a_share_of_every_class_is_held_out(tmp_path: Path) -> None:
    write_images(tmp_path / "train", {"cat": 10, "dog": 5})
    images = folder(tmp_path, valid_fraction=0.2)
    assert isinstance(images.train, Subset) and isinstance(images.valid, Subset)
    assert Counter(images.train.labels.tolist()) == {0: 8, 1: 4}
    assert Counter(images.valid.labels.tolist()) == {0: 2, 1: 1}
    names = [[part.name(index) for index in range(len(part))] for part in (images.train, images.valid)]
    assert len({*names[0], *names[1]}) == 15
    assert all(f"/{images.classes[label]}/" in name for name, label in zip(names[1], images.valid.labels, strict=True))


def test_files_in_folders_below_are_found_and_files_of_other_kinds_are_mentioned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_images(tmp_path / "train", {"cat": 2, "dog": 2})
    write_images(tmp_path / "train" / "dog", {"more": 3}, ".JPG")
    (tmp_path / "train" / "dog" / "notes.txt").write_text("good dogs")
    with caplog.at_level(logging.INFO, "shardwise"):
        images = folder(tmp_path)
    assert len(images.train) + len(images.valid) == 7
    assert f"{tmp_path}/train: 1 files do not end as images do and are left out, notes.txt first" in caplog.text


def test_named_classes_decide_the_numbers(tmp_path: Path) -> None:
    write_images(tmp_path / "train", {"cat": 2, "dog": 3})
    images = folder(tmp_path, classes=["dog", "wolf", "cat"])
    assert images.classes == ["dog", "wolf", "cat"]
    assert sorted([*images.train.labels, *images.valid.labels]) == [0, 0, 0, 2, 2]


def test_what_is_wrong_with_a_folder_is_said(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with pytest.raises(DataError, match=rf"data.root: there is no folder {root}. It holds train/<class>/"):
        folder(root)
    root.mkdir()
    with pytest.raises(
        DataError, match=rf"{root} has no folder train \(it has nothing\): put the class folders into train/"
    ):
        folder(root)
    write_images(root, {"cat": 1, "dog": 1})
    with pytest.raises(DataError, match=r"has no folder train \(it has cat, dog\)"):
        folder(root)
    (root / "train").mkdir()
    with pytest.raises(
        DataError, match=rf"{root}/train holds 0 class folders: to tell classes apart, it needs two or more"
    ):
        folder(root)
    write_images(root / "train", {"cat": 2, "dog": 2})
    (root / "train" / "wolf").mkdir()
    (root / "train" / "wolf" / "wolf.svg").write_text("<svg/>")
    with pytest.raises(
        DataError, match=r"root/train/wolf has no images \(files ending in .apng .* add some, or remove"
    ):
        folder(root)
    with pytest.raises(DataError, match=r"train/wolf: there is no class 'wolf' in data.classes or in training. Rename"):
        folder(root, classes=["cat", "dog"])
    (root / "train" / "wolf" / "wolf.svg").unlink()
    (root / "train" / "wolf").rmdir()
    write_images(root / "valid", {"dogs": 1})
    with pytest.raises(DataError, match=r"valid/dogs: there is no class 'dogs' in training; nearest: 'dog'. Rename"):
        folder(root)
    (root / "valid" / "dogs").rename(tmp_path / "dogs")
    with pytest.raises(DataError, match=rf"{root}/valid holds no class folders: it needs one per class"):
        folder(root)


# ---------------------------------------------------------------- hub


@pytest.fixture
def own_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub-cache")


def write_rows(folder: Path, labels: list[Any]) -> Path:
    import datasets
    from PIL import Image

    folder.mkdir()
    images = [Image.new("RGB", (10, 12), (index, 0, 0)) for index in range(len(labels))]
    kind = datasets.Value("string" if isinstance(labels[0], str) else "int64")
    features = datasets.Features({"picture": datasets.Image(), "kind": kind})
    datasets.Dataset.from_dict({"picture": images, "kind": labels}, features).to_parquet(folder / "train.parquet")
    return folder


def rows(place: Path, **options: Any) -> ImageData:
    columns = {"image_column": "picture", "label_column": "kind"}
    return load(source="hub", dataset=str(place), **{**columns, **options})


@pytest.mark.usefixtures("own_hub_cache")
def test_a_hugging_face_data_set_with_declared_classes_and_splits_is_read(tmp_path: Path) -> None:
    write_images(tmp_path / "set" / "train", {"dog": 3, "cat": 2})
    write_images(tmp_path / "set" / "test", {"dog": 1, "cat": 1})
    images = load(source="hub", dataset=str(tmp_path / "set"), valid_split="test")
    assert images.classes == ["cat", "dog"]
    assert images.train.labels.tolist() == [0, 0, 1, 1, 1] and images.valid.labels.tolist() == [0, 1]
    assert images.train.open(0).size == (24, 20)
    assert images.valid.name(1) == f"{tmp_path / 'set'} (test), row 1"


@pytest.mark.usefixtures("own_hub_cache")
@pytest.mark.parametrize(("labels", "classes"), [(["b", "a", "b", "b"], ["a", "b"]), ([7, 3, 7, 7], ["3", "7"])])
def test_labels_that_are_not_declared_are_the_values_that_there_are(
    tmp_path: Path, labels: list[Any], classes: list[str]
) -> None:
    images = rows(write_rows(tmp_path / "set", labels))
    assert images.classes == classes
    assert sorted([*images.train.labels, *images.valid.labels]) == [0, 1, 1, 1]
    red = {images.train.open(index).getpixel((0, 0))[0]: label for index, label in enumerate(images.train.labels)}
    assert all(str(labels[number]) == classes[label] for number, label in red.items()), "images keep their labels"


@pytest.mark.usefixtures("own_hub_cache")
@pytest.mark.parametrize(
    ("labels", "options", "message"),
    [
        ([0, 1, -1], {}, r"set \(train\), row 2 has no label \('kind' is -1\): leave such rows out"),
        ([0, 1, None], {}, r"set \(train\), row 2 has no label \('kind' is None\)"),
        (["a", "", "b"], {}, r"row 1 has no label \('kind' is ''\)"),
        ([0, 1, 2], {"classes": ["a", "b"]}, r"set \(train\), row 2: label 2 is not one of the 2 classes \(a, b\)"),
        (["a", "c"], {"classes": ["a", "b"]}, r"row 1: label 'c' is not one of the 2 classes \(a, b\)"),
        ([4, 4], {}, r"data.label_column: 'kind' of .* has 1 class: to tell classes apart"),
        ([0, 1], {"image_column": "image"}, r"data.image_column: .* has no column 'image'; it has picture, kind"),
        ([0, 1], {"label_column": "label"}, r"data.label_column: .* has no column 'label'; it has picture, kind"),
        (
            [0, 1],
            {"image_column": "kind"},
            r"data.image_column: 'kind' of .* does not hold images, but Value\('int64'\)",
        ),
        ([0, 1], {"split": "tran"}, r"data.dataset: .* has no split 'tran'; it has train"),
    ],
)
def test_what_is_wrong_with_a_data_set_is_said(
    tmp_path: Path, labels: list[Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        rows(write_rows(tmp_path / "set", labels), **options)


def saved(folder: Path, images: Any, labels: list[Any], kind: Any = None) -> Path:
    import datasets

    rows = datasets.Dataset.from_dict({"picture": images, "kind": labels})
    (rows if kind is None else rows.cast_column("kind", kind)).save_to_disk(folder)
    return folder


def pixels(number: int, value: int = 7) -> list[Any]:
    return [np.full((9, 9, 3), value + index).tolist() for index in range(number)]


@pytest.mark.parametrize(
    ("labels", "classes", "numbers"),
    [
        ([0.0, 1.0, 1.0, 0.0], [], [0, 1, 1, 0]),
        ([0.0, 1.0, 1.0, 0.0], ["a", "b"], [0, 1, 1, 0]),
        ([10.0, 9.0, 9.0, 10.0], [], [1, 0, 0, 1]),
        ([True, False, False, True], ["no", "yes"], [1, 0, 0, 1]),
        (["Mu\u0308ller", "b", "b", "M\u00fcller"], [], [0, 1, 1, 0]),
    ],
)
def test_whole_numbers_truth_and_accents_are_classes_however_they_are_stored(
    tmp_path: Path, labels: list[Any], classes: list[str], numbers: list[int]
) -> None:
    images = rows(saved(tmp_path / "set", pixels(4), labels), classes=classes, valid_split="train")
    assert images.train.labels.tolist() == numbers
    assert images.classes == classes or "." not in "".join(images.classes)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (
            [0.0, 0.5, 1.0],
            r"set \(train\), row 1: label 0.5 \('kind'\) is no whole number, but a quantity, and no class",
        ),
        ([0.0, float("nan"), 1.0], r"set \(train\), row 1 has no label \('kind' is nan\): leave such rows out"),
        ([0.0, None, 1.0], r"set \(train\), row 1 has no label \('kind' is None\)"),
        (
            [[0], [1], [0, 1]],
            r"data.label_column: 'kind' of .* holds List\(.*int64.*\), and not one class per image: name a",
        ),
        ([{"a": 1}] * 3, r"data.label_column: 'kind' of .* holds \{'a': .*\}, and not one class per image"),
        ([b"0", b"1", b"0"], r"data.label_column: 'kind' of .* holds Value\('binary'\), and not one class per image"),
    ],
)
def test_labels_that_are_no_classes_are_an_error(tmp_path: Path, labels: list[Any], message: str) -> None:
    place = saved(tmp_path / "set", pixels(3), labels)
    for classes in ([], ["a", "b"]):
        with pytest.raises(DataError, match=message):
            rows(place, classes=classes)


@pytest.mark.parametrize("value", [-1, 256, 70_000])
def test_arrays_of_numbers_are_images_where_they_fit_into_bytes(tmp_path: Path, value: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        images = rows(saved(tmp_path / "set", pixels(3, 253), [0, 1, 0]), valid_split="train")
    assert [images.train.open(index).getpixel((0, 0)) for index in range(3)] == [
        (each,) * 3 for each in (253, 254, 255)
    ]
    with pytest.raises(
        DataError, match=r"data.image_column: 'picture' .* does not hold images, .* outside 0 to 255: choose"
    ):
        rows(saved(tmp_path / "other", pixels(1, value) * 2, [0, 1]))


def test_a_data_set_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    import huggingface_hub.constants

    with pytest.raises(
        DataError, match=r"data.dataset: '.*nothing' \(split 'train'\) is neither a folder .* nor a name on the hub"
    ):
        rows(tmp_path / "nothing")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        DataError, match=r"'nobody/nothing' \(split 'train'\) is neither a folder .* nor found on the hub: "
    ):
        load(source="hub", dataset="nobody/nothing")
