"""Every class can be learned and judged, or it is said; and a run keeps the classes that it has."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from shardwise import Session
from shardwise.cli import main
from shardwise.errors import ConfigError, DataError
from shardwise.tasks.images.task import ImagesTask
from shardwise.watch.run_folder import dump_config
from tests.images_task.made import task_of, write_images
from tests.images_task.test_sources import own_hub_cache  # noqa: F401
from tests.tasks import config_of


def task_in(root: Path, *overrides: str) -> ImagesTask:
    return task_of("task: images", "data.source=folder", f"data.root={root}", "data.image_size=32", *overrides)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level(logging.WARNING, "shardwise")
    return lambda: [record.getMessage() for record in caplog.records]


def test_classes_that_all_have_images_are_passed_over_in_silence(tmp_path: Path, said: Any) -> None:
    write_images(tmp_path / "train", {"cat": 3, "dog": 3})
    task_in(tmp_path).prepare_data()
    assert said() == []


def test_a_class_without_training_images_is_told(tmp_path: Path, said: Any) -> None:
    write_images(tmp_path / "train", {"cat": 3, "dog": 3})
    task_in(tmp_path, "data.classes=[cat, wolf, dog]").prepare_data()
    assert said() == [
        "there is no training image of the class wolf: the model has an output for it, and learns never to choose it"
    ]


def test_a_class_that_is_not_validated_is_told(tmp_path: Path, said: Any) -> None:
    write_images(tmp_path / "train", {"ant": 2, "bee": 2, "cat": 2})
    write_images(tmp_path / "valid", {"bee": 1})
    shutil.rmtree(tmp_path / "valid" / "bee")
    write_images(tmp_path / "valid", {"cat": 1})
    for file in (tmp_path / "valid" / "cat").iterdir():
        file.write_bytes((tmp_path / "train" / "cat" / "1.png").read_bytes() + b" ")
    task_in(tmp_path).prepare_data()
    assert said() == ["there is no validation image of 2 classes (ant, bee): the accuracy says nothing about it"]


def test_a_class_of_one_image_is_trained_on_and_told(tmp_path: Path, said: Any) -> None:
    write_images(tmp_path / "train", {"cat": 5, "dog": 1})
    task_in(tmp_path).prepare_data()
    assert said() == ["there is no validation image of the class dog: the accuracy says nothing about it"]


def test_a_class_that_is_validated_and_never_trained_on_is_an_error(tmp_path: Path) -> None:
    write_images(tmp_path / "train", {"cat": 3, "dog": 3})
    write_images(tmp_path / "valid", {"cat": 1, "wolf": 1})
    with pytest.raises(DataError, match="validation images of the class wolf, but none to train on"):
        task_in(tmp_path, "data.classes=[cat, dog, wolf]").prepare_data()


def test_one_class_alone_is_an_error(tmp_path: Path) -> None:
    write_images(tmp_path / "train", {"cat": 3})
    with pytest.raises(
        DataError, match="all 2 training images are of one class, the class cat: there is nothing to tell"
    ):
        task_in(tmp_path, "data.classes=[cat, dog]").prepare_data()


def test_training_and_validation_number_the_classes_alike(tmp_path: Path) -> None:
    write_images(tmp_path / "train", {"ant": 2, "bee": 2, "cat": 2})
    write_images(tmp_path / "valid", {"cat": 2, "bee": 1})
    task = task_in(tmp_path)
    assert task.train_data().pictures.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert task.valid_data().pictures.labels.tolist() == [1, 2, 2]


def test_an_image_in_two_classes_is_told_with_both_files(tmp_path: Path, said: Any) -> None:
    write_images(tmp_path / "train", {"cat": 3, "dog": 3})
    write_images(tmp_path / "valid", {"cat": 1, "dog": 1}, size=(30, 30))
    shutil.copy(tmp_path / "train" / "cat" / "1.png", tmp_path / "train" / "dog" / "same.png")
    shutil.copy(tmp_path / "train" / "cat" / "1.png", tmp_path / "train" / "cat" / "again.png")
    task_in(tmp_path).prepare_data()
    (line,) = said()
    assert line.startswith("1 image stands in two classes or more. ")
    assert "train/cat/" in line and "train/dog/same.png (dog), for example: one of the two labels is wrong" in line


def test_an_image_of_one_class_to_train_on_and_of_another_to_validate_on_is_told(tmp_path: Path, said: Any) -> None:
    write_images(tmp_path / "train", {"cat": 3, "dog": 3})
    write_images(tmp_path / "valid", {"cat": 1, "dog": 1}, size=(30, 30))
    shutil.copy(tmp_path / "train" / "cat" / "1.png", tmp_path / "valid" / "dog" / "same.png")
    task_in(tmp_path).prepare_data()
    assert said() == [
        f"1 image stands in two classes or more. {tmp_path}/train/cat/1.png (cat) has the same content as "
        f"{tmp_path}/valid/dog/same.png (dog), for example: one of the two labels is wrong"
    ]


@pytest.mark.parametrize(
    ("classes", "pairs"),
    [
        (["Cat", "cat", "dog"], "'Cat' and 'cat'"),
        (["cat", "cat ", "dog"], "'cat' and 'cat '"),
        (["icecream", "ice cream", "ICE CREAM"], "'ICE CREAM' and 'ice cream' and 'icecream'"),
        (["Masse", "Maße", "cat", "car"], ""),
    ],
)
def test_names_that_look_like_one_class_are_told_once(
    tmp_path: Path, said: Any, classes: list[str], pairs: str
) -> None:
    write_images(tmp_path / "train", dict.fromkeys(classes, 2))
    write_images(tmp_path / "valid", dict.fromkeys(classes, 1))
    task_in(tmp_path).prepare_data()
    line = (
        f"the names of some classes differ in capitals or spaces alone: {pairs}. Each is learned as a class of its own: if they "
        "are one, give them one name"
    )
    assert said() == ([line] if pairs else [])


def test_what_is_unusual_about_images_is_told_once_with_an_example_at_every_start(tmp_path: Path, said: Any) -> None:
    from PIL import Image

    write_images(tmp_path / "train", {"cat": 5, "dog": 5})
    see_through = Image.new("RGBA", (12, 12), (0, 0, 0, 0))
    see_through.save(tmp_path / "train" / "cat" / "x.png")
    see_through.save(tmp_path / "train" / "dog" / "y.png", pnginfo=_note())
    frames = [Image.new("RGB", (12, 12), colour) for colour in ("red", "green")]
    frames[0].save(tmp_path / "train" / "dog" / "z.gif", save_all=True, append_images=frames[1:])
    Image.new("RGB", (1, 1)).save(tmp_path / "train" / "cat" / "pixel.bmp")
    expected = [
        f"1 of 14 images has several pages or frames ({tmp_path}/train/dog/z.gif, for example): the first one is used, the "
        "others are not",
        f"2 of 14 images have transparent parts ({tmp_path}/train/cat/x.png, for example): these show data.background, "
        "[255, 255, 255]",
        f"1 of 14 images has fewer than 8 pixels in width or height ({tmp_path}/train/cat/pixel.bmp, for example): are they "
        "placeholders, or downloads that failed?",
    ]
    for _ in range(2):  # the second time it is remembered
        task_in(tmp_path).prepare_data()
    for line in expected:
        assert said().count(line) == 2, (line, said())
    task_in(tmp_path, "data.background=[0, 0, 0]").prepare_data()
    assert not any("transparent" in line for line in said()[-2:]), "a background that was chosen needs no warning"


def _note() -> object:
    from PIL.PngImagePlugin import PngInfo

    note = PngInfo()
    note.add_text("author", "somebody else, so that it is another file")
    return note


# ---------------------------------------------------------------- hub


def declared(folder: Path, labels: list[int], names: list[str]) -> Path:
    import datasets
    from PIL import Image

    folder.mkdir()
    images = [Image.new("RGB", (10, 12), (index, 0, 0)) for index in range(len(labels))]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=names)})
    datasets.Dataset.from_dict({"image": images, "label": labels}, features).to_parquet(folder / "train.parquet")
    return folder


@pytest.mark.usefixtures("own_hub_cache")
@pytest.mark.parametrize(
    ("classes", "labels"),
    [
        (["dog", "cat"], [1, 1, 0, 0]),  # by name: a cat stays a cat
        (["cat", "dog"], [0, 0, 1, 1]),
        (["Felis", "Canis"], [0, 0, 1, 1]),  # other names for the same numbers
    ],
)
def test_declared_classes_keep_their_images_when_the_config_names_them_in_another_order(
    tmp_path: Path, classes: list[str], labels: list[int]
) -> None:
    place = declared(tmp_path / "set", [0, 0, 1, 1], ["cat", "dog"])
    task = task_of("task: images", "data.source=hub", f"data.dataset={place}", f"data.classes={classes}")
    found = {}
    for data in (task.train_data(), task.valid_data()):
        for index in range(len(data)):
            found[data.pictures.open(index).getpixel((0, 0))[0]] = int(data.pictures.labels[index])
    assert [found[red] for red in range(4)] == labels
    assert task.classes == classes


def splits(folder: Path, train: list[str], test: list[str] | None) -> Path:
    """Two images of each class, saved with the classes declared in this order; without a name, numbers alone."""
    import datasets
    from PIL import Image

    def part(names: list[str] | None, red: int) -> datasets.Dataset:
        label = datasets.Value("int64") if names is None else datasets.ClassLabel(names=names)
        numbers = [index % len(names or train) for index in range(6)]
        images = [Image.new("RGB", (10, 12), (red + index, 0, 0)) for index in range(6)]
        features = datasets.Features({"image": datasets.Image(), "label": label})
        return datasets.Dataset.from_dict({"image": images, "label": numbers}, features)

    datasets.DatasetDict(train=part(train, 0), test=part(test, 100)).save_to_disk(folder)
    return folder


def both(place: Path, *overrides: str) -> ImagesTask:
    return task_of("task: images", "data.source=hub", f"data.dataset={place}", "data.valid_split=test", *overrides)


@pytest.mark.parametrize(
    ("classes", "labels"),
    [([], [1, 0]), (["cat", "dog"], [1, 0]), (["dog", "cat"], [0, 1]), (["Felis", "Canis"], [1, 0])],
)
def test_splits_that_declare_their_classes_in_different_orders_are_mapped_by_name(
    tmp_path: Path, classes: list[str], labels: list[int]
) -> None:
    place = splits(tmp_path / "set", ["cat", "dog"], ["dog", "cat"])
    task = both(place, *([f"data.classes={classes}"] if classes else []))
    assert task.classes == (classes or ["cat", "dog"])
    assert task.valid_data().pictures.labels.tolist() == labels * 3
    assert task.train_data().pictures.labels.tolist() == labels[::-1] * 3


@pytest.mark.parametrize(
    ("test", "classes", "label"),
    [
        (["cat", "eel"], "", "'eel'"),
        (["kitten", "puppy"], "", "'kitten'"),
        (["kitten", "puppy"], "[a, b]", "'kitten'"),
        (None, "", "0"),
        (None, "[dog, cat]", "0"),
    ],
)
def test_a_split_with_classes_that_training_does_not_have_is_refused(
    tmp_path: Path, test: list[str] | None, classes: str, label: str
) -> None:
    place = splits(tmp_path / "set", ["cat", "dog"], test)
    with pytest.raises(DataError, match=rf"set \(test\), row \d: label {label} is not one of the 2 classes"):
        both(place, *([f"data.classes={classes}"] if classes else [])).valid_data()


def test_classes_that_take_the_place_of_declared_ones_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "shardwise")
    place = splits(tmp_path / "set", ["cat", "dog"], ["cat", "dog"])
    both(place, "data.classes=[dog, cat]").train_data()
    assert "is called" not in caplog.text, "these are the names that are declared"
    both(place, "data.classes=[a, b]").train_data()
    assert [record.getMessage() for record in caplog.records if "is called" in record.getMessage()] == [
        "data.classes has none of the names that the data set declares, and stands in their place: cat is called a, dog is "
        "called b"
    ]


@pytest.mark.usefixtures("own_hub_cache")
def test_rows_of_a_class_that_the_config_leaves_out_are_an_error(tmp_path: Path) -> None:
    place = declared(tmp_path / "set", [0, 1, 2, 0], ["cat", "dog", "bee"])
    task = task_of("task: images", "data.source=hub", f"data.dataset={place}", "data.classes=[bee, cat]")
    with pytest.raises(DataError, match=r"row 1: label 'dog' is not one of the 2 classes \(bee, cat\)"):
        task.train_data()


# ---------------------------------------------------------------- in a run

RUN = """
task: images
data: {source: folder, image_size: 16}
model: {architecture: resnet, depths: [1], widths: [8], extra: {embedding_size: 8}}
training: {strategy: single, batch_size: 4, max_epochs: 2}
"""


@pytest.fixture
def trained(tmp_path: Path) -> Any:
    """One epoch is trained, with the classes cat and dog; a function goes on from there."""
    write_images(tmp_path / "images" / "train", {"cat": 5, "dog": 5})
    config = config_of(RUN, [f"run_dir={tmp_path / 'run'}", f"data.root={tmp_path / 'images'}"])

    def go_on(resume: bool = True) -> None:
        with Session(config) as session:
            session.prepare()
            if resume:
                session.resume("latest")
                return
            for batch in session.batches():
                session.step(batch)
                if session.cursor.epoch == 1:
                    break
            session.save({"loss": 0.0})
            session.wait()
        (tmp_path / "run" / "config.yaml").write_text(dump_config(config))

    go_on(resume=False)
    return go_on


def test_a_run_goes_on_with_the_same_classes_alone(tmp_path: Path, trained: Any) -> None:
    trained()
    train = tmp_path / "images" / "train"
    (train / "cat").rename(train / "wolf")
    with pytest.raises(
        ConfigError,
        match=r"trained with 2 classes, and there are 2 now. The model's output 0 was cat and would be dog. Resume with the "
        "classes that it had",
    ):
        trained()


def test_a_class_more_is_an_error_that_names_it(tmp_path: Path, trained: Any) -> None:
    write_images(tmp_path / "images" / "more", {"ant": 5})
    (tmp_path / "images" / "more" / "ant").rename(tmp_path / "images" / "train" / "ant")
    (tmp_path / "images" / "more").rmdir()
    with pytest.raises(
        ConfigError, match=r"trained with 2 classes, and there are 3 now. The model's output 0 was cat and would be ant"
    ):
        trained()


def test_an_export_has_the_classes_of_its_training_whatever_has_become_of_the_folders(
    tmp_path: Path, trained: Any
) -> None:
    from transformers import AutoModelForImageClassification

    train = tmp_path / "images" / "train"
    (train / "cat").rename(train / "wolf")
    assert main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "model")]) == 0
    shutil.rmtree(tmp_path / "images")
    assert main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "again")]) == 0
    for name in ("model", "again"):
        loaded = AutoModelForImageClassification.from_pretrained(tmp_path / name)
        assert loaded.config.id2label == {0: "cat", 1: "dog"}
