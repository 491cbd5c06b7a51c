"""Who is trained on and who is held out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import DataError
from tests.segmentation_task.files import a_volume, folder_task, msd_task, task_of, write_folder, write_msd, write_nifti


def names(subjects: Any) -> list[str]:
    return [subject.name for subject in subjects]


def test_a_valid_folder_is_what_is_validated_on(tmp_path: Path) -> None:
    split = folder_task(write_folder(tmp_path, train=3, valid=2)).subjects
    assert names(split.train) == ["train-0", "train-1", "train-2"]
    assert names(split.valid) == ["valid-0", "valid-1"]


@pytest.mark.parametrize("name", ["valid", "validation", "val"])
def test_the_folder_that_is_validated_on_may_have_three_names(tmp_path: Path, name: str) -> None:
    write_folder(tmp_path, train=3, valid=2)
    (tmp_path / "valid").rename(tmp_path / name)
    split = folder_task(tmp_path).subjects
    assert names(split.train) == ["train-0", "train-1", "train-2"]
    assert names(split.valid) == ["valid-0", "valid-1"] and split.valid[0].image.parent.parent.name == name


@pytest.mark.parametrize("pair", [("valid", "val"), ("val", "validation"), ("valid", "validation"), ("Val", "valid")])
def test_two_folders_to_validate_on_are_refused(tmp_path: Path, pair: tuple[str, str]) -> None:
    write_folder(tmp_path, train=3, valid=2)
    (tmp_path / "valid").rename(tmp_path / pair[0])
    (tmp_path / pair[1]).mkdir()
    first, second = sorted(pair)
    assert complaint(folder_task(tmp_path)) == (
        f"{tmp_path} has {first}/ and {second}/: leave one of them to validate on, and move the others away"
    )


@pytest.mark.parametrize("name", ["Valid", "VAL", "Validation", "validate", "val_set", "valid-data", "val2", "vaild"])
def test_a_folder_that_only_looks_like_validation_is_not_passed_over(tmp_path: Path, name: str) -> None:
    """A share of train/ would be held out, and those in the folder never looked at."""
    write_folder(tmp_path, train=3, valid=2)
    (tmp_path / "valid").rename(tmp_path / name)
    assert complaint(folder_task(tmp_path)) == (
        f"{tmp_path / name} would not be used: rename it to valid/ to validate on it, or move it away to hold out a share "
        "of train/"
    )


@pytest.mark.parametrize("name", ["test", "values", "valves", "train_notes", "evaluation", "valencia"])
def test_other_folders_beside_train_are_nobodys_business(tmp_path: Path, name: str) -> None:
    write_folder(tmp_path, train=3, valid=0)
    (tmp_path / name).mkdir()
    assert len(folder_task(tmp_path).subjects.valid) == 1


def test_a_validation_folder_that_is_none_is_named(tmp_path: Path) -> None:
    write_folder(tmp_path, train=3, valid=0)
    link = tmp_path / "valid"
    link.symlink_to(tmp_path / "unmounted")
    message = f"{link} is no folder, or a link that leads nowhere: mend it, or remove it"
    assert complaint(folder_task(tmp_path)) == message
    link.unlink()
    link.write_text("")
    assert complaint(folder_task(tmp_path)) == message
    link.unlink()
    link.mkdir()
    assert complaint(folder_task(tmp_path)).startswith(f"{link} holds no subjects: put each into a folder of its own")


def test_without_a_valid_folder_a_share_of_subjects_is_held_out_by_the_seed(tmp_path: Path) -> None:
    write_folder(tmp_path, train=10, valid=0)
    split = folder_task(tmp_path, "data.valid_fraction=0.3").subjects
    assert len(split.valid) == 3 and len(split.train) == 7
    assert set(names(split.train)) | set(names(split.valid)) == {f"train-{index}" for index in range(10)}
    again = folder_task(tmp_path, "data.valid_fraction=0.3").subjects
    other = folder_task(tmp_path, "data.valid_fraction=0.3", "seed=1").subjects
    assert names(again.valid) == names(split.valid) != names(other.valid)


@pytest.mark.parametrize("fraction", [0.01, 0.99])
def test_neither_part_is_ever_empty(tmp_path: Path, fraction: float) -> None:
    split = folder_task(write_folder(tmp_path, train=3, valid=0), f"data.valid_fraction={fraction}").subjects
    assert split.train and split.valid and not set(split.train) & set(split.valid)


def test_synthetic_subjects_are_known_before_their_files_are_made() -> None:
    task = task_of("data.num_subjects=10", "data.valid_fraction=0.2")
    assert len(task.train_data()) == 8 and len(task.valid_data()) == 2
    assert not task.subjects.train[0].image.exists()


def test_a_decathlon_folder_gives_subjects_classes_and_channels(tmp_path: Path) -> None:
    task = msd_task(write_msd(tmp_path, subjects=5, channels=2))
    assert len(task.subjects.train) == 4 and len(task.subjects.valid) == 1
    assert task.classes == ["background", "left ventricle", "tumour"]
    assert (task.shapes.in_channels, task.shapes.out_channels) == (2, 3)
    task.prepare_data()
    assert task.train_data()[0][0]["image"].shape == (2, 16, 16, 16)


def test_classes_that_are_given_go_before_those_of_dataset_json(tmp_path: Path) -> None:
    task = msd_task(write_msd(tmp_path), "data.classes=[none, ventricle, tumour]", "data.in_channels=2")
    assert task.classes == ["none", "ventricle", "tumour"]
    (tmp_path / "dataset.json").unlink()
    assert task.build_model() is not None, "an export needs no data then"


def change_json(root: Path, **changes: Any) -> Path:
    file = root / "dataset.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return file


@pytest.mark.parametrize("key", ["validation", "valid", "val"])
def test_those_whom_a_dataset_json_lists_to_validate_on_are_validated_on(tmp_path: Path, key: str) -> None:
    listed = json.loads((write_msd(tmp_path, subjects=5) / "dataset.json").read_text())["training"]
    change_json(tmp_path, training=listed[:2], **{key: listed[2:]})
    split = msd_task(tmp_path, "data.valid_fraction=0.2").subjects
    assert names(split.train) == ["case_000", "case_001"] and not split.held_out
    assert names(split.valid) == ["case_002", "case_003", "case_004"]


@pytest.mark.parametrize("empty", [[], None])
def test_an_empty_list_to_validate_on_is_none(tmp_path: Path, empty: Any) -> None:
    write_msd(tmp_path, subjects=5)
    change_json(tmp_path, validation=empty)
    split = msd_task(tmp_path).subjects
    assert len(split.train) == 4 and len(split.valid) == 1 and split.held_out


def test_a_list_to_validate_on_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    file = write_msd(tmp_path, subjects=5) / "dataset.json"
    listed = json.loads(file.read_text())["training"]
    change_json(tmp_path, validation=["./imagesTs/x.nii.gz"])
    assert complaint(msd_task(tmp_path)).startswith(
        f'{file}: entry 0 of "validation" must be {{"image": …, "label": …}}'
    )
    change_json(tmp_path, validation="fold 0")
    assert complaint(msd_task(tmp_path)).startswith(f'{file}: "validation" must be a list of')
    change_json(tmp_path, validation=listed[4:])
    assert complaint(msd_task(tmp_path)) == (
        f"{file}: case_004.nii.gz stands twice in the lists to train and to validate on; remove one of the two"
    )
    change_json(tmp_path, training=listed[:4], val=listed[4:])
    assert complaint(msd_task(tmp_path)) == f"{file} has the lists validation and val: leave one of them to validate on"


@pytest.mark.parametrize(
    "labels",
    [
        {"0": "Background", "1": "left ventricle", "2": "tumour"},
        {"background": 0, "left_ventricle": 1, "tumour": 2},
        ["background", "left ventricle", "tumour"],
    ],
)
def test_classes_in_another_order_than_in_dataset_json_are_refused(tmp_path: Path, labels: Any) -> None:
    file = write_msd(tmp_path) / "dataset.json"
    change_json(tmp_path, labels=labels)
    assert complaint(msd_task(tmp_path, "data.classes=[background, tumour, left ventricle]")) == (
        f"data.classes: 'tumour' is class 1 here, but class 2 in \"labels\" of {file}: name the classes in the order of "
        "their numbers, or leave data.classes out"
    )
    assert "'background' is class 2 here" in complaint(msd_task(tmp_path, "data.classes=[other, lesion, background]"))
    for same in ("[background, Left-Ventricle, tumour]", "[nothing, ventricle, mass]"):
        msd_task(tmp_path, f"data.classes={same}").prepare_data()


def test_a_dataset_json_may_begin_with_the_mark_that_windows_puts_there(tmp_path: Path) -> None:
    file = write_msd(tmp_path) / "dataset.json"
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert len(msd_task(tmp_path).subjects.all) == 5


def complaint(task: Any) -> str:
    with pytest.raises(DataError) as caught:
        task.prepare_data()
    return str(caught.value)


def test_a_missing_root_is_named(tmp_path: Path) -> None:
    assert complaint(folder_task(tmp_path / "a")).startswith(
        f"data.root: there is no folder {tmp_path}/a (looked for from"
    )
    assert complaint(msd_task(tmp_path)).startswith(
        f"data.root: there is no {tmp_path}/dataset.json; source: msd reads"
    )


def test_a_folder_without_subjects_is_named(tmp_path: Path) -> None:
    assert complaint(folder_task(tmp_path)).startswith(
        f"data.root: there is no folder {tmp_path}/train; source: folder"
    )
    (tmp_path / "train").mkdir()
    assert complaint(folder_task(tmp_path)).startswith(f"{tmp_path}/train holds no subjects: put each into a folder")


def test_an_image_or_a_label_alone_is_named_and_all_of_them_at_once(tmp_path: Path) -> None:
    write_folder(tmp_path, train=4, valid=0)
    train = tmp_path / "train"
    (train / "train-0" / "label.nii.gz").unlink()
    (train / "train-1" / "img.nii.gz").unlink()
    for file in (train / "train-2").iterdir():
        file.unlink()
    assert complaint(folder_task(tmp_path)).splitlines() == [
        f"{train}/train-0/img.nii.gz has no label: add {train}/train-0/label.nii.gz, or remove the subject",
        f"  {train}/train-1/label.nii.gz has no image: add {train}/train-1/img.nii.gz, or remove the subject",
        f"  {train}/train-2 has neither img.nii.gz nor label.nii.gz: add them, or remove the folder",
    ]


@pytest.mark.parametrize("stem", ["img", "label"])
def test_a_file_that_is_there_packed_and_unpacked_is_refused(tmp_path: Path, stem: str) -> None:
    """One of the two would be taken, and nobody knows which is meant."""
    write_folder(tmp_path, train=3, valid=0)
    subject = tmp_path / "train" / "train-1"
    write_nifti(subject / f"{stem}.nii", a_volume((16, 16, 16), 9)[stem == "label"])
    assert complaint(folder_task(tmp_path)) == (
        f"{subject} has both {stem}.nii.gz and {stem}.nii: remove the one that is not meant"
    )
    (subject / f"{stem}.nii.gz").unlink()
    folder_task(tmp_path).prepare_data()


@pytest.mark.parametrize("stem", ["img", "label"])
def test_a_link_or_a_folder_in_place_of_a_file_is_named(tmp_path: Path, stem: str) -> None:
    write_folder(tmp_path, train=3, valid=0)
    file = tmp_path / "train" / "train-1" / f"{stem}.nii.gz"
    file.unlink()
    file.mkdir()
    assert complaint(folder_task(tmp_path)) == (f"{file} is a folder: put the file itself there, or remove the subject")
    file.rmdir()
    file.symlink_to(tmp_path / "unmounted.nii.gz")
    assert complaint(folder_task(tmp_path)) == (
        f"{file} is a link that leads nowhere: put the file itself there, or remove the subject"
    )


def test_an_image_that_is_its_own_label_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, train=3, valid=0)
    subject = tmp_path / "train" / "train-1"
    (subject / "img.nii.gz").unlink()
    (subject / "img.nii.gz").symlink_to(subject / "label.nii.gz")
    assert complaint(folder_task(tmp_path)) == (
        f"{subject}/label.nii.gz is the image itself: the label must be a file of its own"
    )


def test_what_lies_beside_the_subjects_is_not_passed_over(tmp_path: Path) -> None:
    write_folder(tmp_path, train=3, valid=0)
    train = tmp_path / "train"
    (train / "README.txt").write_text("notes")
    (train / ".DS_Store").write_text("")
    for name in ("._train-0", "__MACOSX", "@eaDir"):
        (train / name).mkdir()
    folder_task(tmp_path).prepare_data()
    write_nifti(train / "case_7.nii.gz", a_volume((16, 16, 16))[0])
    (train / "case_8").symlink_to(tmp_path / "unmounted")
    assert complaint(folder_task(tmp_path)).splitlines() == [
        f"{train}/case_7.nii.gz is in no subject's folder: move it to {train}/<subject>/, or remove it",
        f"  {train}/case_8 is a link that leads nowhere: mend it, or remove it",
    ]


def test_too_many_problems_are_counted(tmp_path: Path) -> None:
    for index in range(11):
        (tmp_path / "train" / f"s{index:02d}").mkdir(parents=True)
    lines = complaint(folder_task(tmp_path)).splitlines()
    assert len(lines) == 9 and lines[-1] == "  and 3 more"


def test_one_subject_cannot_be_split(tmp_path: Path) -> None:
    message = complaint(folder_task(write_folder(tmp_path, train=1, valid=0)))
    assert message.startswith("1 subject cannot be split into training and validation")
    assert str(tmp_path / "train" / "train-0" / "img.nii.gz") in message


def test_a_subject_that_is_linked_into_both_parts_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, train=2, valid=1)
    (tmp_path / "valid" / "again").symlink_to(tmp_path / "train" / "train-0")
    assert complaint(folder_task(tmp_path)) == (
        f"{tmp_path}/valid/again/img.nii.gz is also in train/: remove it from one of the two"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"training": []}, 'no list "training" of'),
        ({"training": [{"image": "./a.nii.gz"}]}, 'entry 0 of "training" must be {"image": …, "label": …}, not'),
        ({"training": ["./a.nii.gz"]}, 'entry 0 of "training" must be'),
        ({"labels": {"1": "liver"}}, '"labels" must name the classes from "0" (background) on without gaps'),
        ({"labels": {"0": "background", "2": "liver"}}, "without gaps"),
        ({"labels": {"background": 0, "liver": 1}}, "without gaps"),
        ({"labels": {"0": "b", "1": "a b", "2": "a-b"}}, "dice_a_b would name two metrics; give every class"),
    ],
)
def test_a_dataset_json_with_something_missing_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    file = write_msd(tmp_path) / "dataset.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    said = complaint(msd_task(tmp_path))
    assert said.startswith(f"{file}: ") and message in said


@pytest.mark.parametrize("labels", [None, {"background": 0, "liver": 1}, {"0": "b", "1": "a b", "2": "a-b"}])
def test_labels_of_a_dataset_json_need_not_be_right_where_the_config_names_the_classes(
    tmp_path: Path, labels: Any
) -> None:
    file = write_msd(tmp_path) / "dataset.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"labels": labels}))
    assert complaint(msd_task(tmp_path)).endswith("; or set data.classes")
    task = msd_task(tmp_path, "data.classes=[none, ventricle, tumour]")
    task.prepare_data()
    assert task.classes == ["none", "ventricle", "tumour"]


def test_a_dataset_json_that_is_none_is_named(tmp_path: Path) -> None:
    file = tmp_path / "dataset.json"
    file.write_text("{")
    assert complaint(msd_task(tmp_path)).startswith(f"{file} is not valid JSON: ")
    file.write_text("[]")
    assert 'no list "training"' in complaint(msd_task(tmp_path))


def test_a_subject_that_is_listed_twice_is_refused(tmp_path: Path) -> None:
    """It could be trained on and held out at once."""
    file = write_msd(tmp_path) / "dataset.json"
    content = json.loads(file.read_text())
    content["training"].append(content["training"][0])
    file.write_text(json.dumps(content))
    said = complaint(msd_task(tmp_path))
    assert said == f"{file}: case_000.nii.gz stands twice in the training list; remove one of the two"


def test_a_label_that_is_listed_for_two_images_is_refused(tmp_path: Path) -> None:
    file = write_msd(tmp_path) / "dataset.json"
    content = json.loads(file.read_text())
    content["training"][3]["label"] = "labelsTr/../labelsTr/case_001.nii.gz"
    file.write_text(json.dumps(content))
    said = complaint(msd_task(tmp_path))
    assert said == f"{file}: the label case_001.nii.gz stands twice in the training list; remove one of the two"


def test_an_image_that_is_listed_as_its_label_is_refused(tmp_path: Path) -> None:
    file = write_msd(tmp_path) / "dataset.json"
    content = json.loads(file.read_text())
    content["training"][3]["label"] = content["training"][3]["image"]
    file.write_text(json.dumps(content))
    said = complaint(msd_task(tmp_path))
    assert said == (
        f"{file}: {tmp_path}/imagesTr/case_003.nii.gz is the image itself: the label must be a file of its own"
    )
