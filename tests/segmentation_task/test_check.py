"""Every file that cannot be trained on is named before the training, with what to do; what was read is remembered."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwise.data.cache import cache_folder
from shardwise.errors import DataError
from shardwise.tasks.segmentation import check, facts
from shardwise.tasks.segmentation.nifti import Grid
from tests.segmentation_task.files import a_volume, folder_task, msd_task, write_folder, write_msd, write_nifti


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "data", train=2, valid=1)


def image_of(root: Path) -> Path:
    return root / "train" / "train-0" / "img.nii.gz"


def label_of(root: Path) -> Path:
    return root / "train" / "train-0" / "label.nii.gz"


def complaint(root: Path, *overrides: str) -> str:
    with pytest.raises(DataError) as caught:
        folder_task(root, *overrides).prepare_data()
    return str(caught.value)


def test_right_files_are_let_through(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    task = folder_task(root)
    with caplog.at_level(logging.INFO, "shardwise"):
        task.prepare_data()
    assert caplog.records == [], "nothing to complain about"
    found = check.check_subjects(task.subjects.all, 2, None, task.data)
    grid = Grid((16, 16, 16), 1, np.eye(4).tolist())
    assert [(each.image, each.label, each.values) for each in found] == [(grid, grid, [0.0, 1.0])] * 3
    assert all(-2 < each.lowest < 0 < 2 < each.highest < 4 for each in found)


@pytest.mark.parametrize("damage", ["cut", "text", "empty", "flipped"])
@pytest.mark.parametrize("which", [image_of, label_of])
def test_a_damaged_file_is_named(root: Path, which: Any, damage: str) -> None:
    file = which(root)
    content = file.read_bytes()
    middle = len(content) // 2
    damaged = {
        "cut": content[:middle],
        "text": b"this is no volume",
        "empty": b"",
        "flipped": content[:middle]
        + bytes(255 - byte for byte in content[middle : middle + 20])
        + content[middle + 20 :],
    }
    file.write_bytes(damaged[damage])
    message = complaint(root)
    assert message.startswith(f"{file} is damaged or no NIfTI file (")
    assert message.endswith("): copy it again, or remove the subject") and "\n" not in message


def test_all_damaged_files_are_named_together(root: Path) -> None:
    for file in (image_of(root), root / "valid" / "valid-0" / "label.nii.gz"):
        file.write_bytes(b"")
    lines = complaint(root).splitlines()
    assert [line.split()[0] for line in lines] == [str(image_of(root)), f"{root}/valid/valid-0/label.nii.gz"]


def test_a_listed_file_that_is_missing_is_named(tmp_path: Path) -> None:
    root = write_msd(tmp_path / "msd")
    (root / "labelsTr" / "case_002.nii.gz").unlink()
    with pytest.raises(DataError) as caught:
        msd_task(root).prepare_data()
    file = root / "labelsTr" / "case_002.nii.gz"
    assert str(caught.value) == f"there is no file {file}: put it there, or take the subject out of the data set"


def test_shapes_that_differ_are_named(root: Path) -> None:
    write_nifti(label_of(root), a_volume((16, 16, 12))[1])
    assert complaint(root) == (
        f"{label_of(root)} has the shape 16×16×12, but its image img.nii.gz 16×16×16: resample one onto the other"
    )


def test_a_label_that_lies_elsewhere_in_space_is_named(root: Path) -> None:
    write_nifti(label_of(root), a_volume((16, 16, 16))[1], np.diag([-1, 1, 1, 1]))
    message = complaint(root)
    assert message.startswith(f"{label_of(root)} lies 30.0 voxels beside its image img.nii.gz (their headers differ in")
    rounding = np.eye(4) + 1e-4
    write_nifti(label_of(root), a_volume((16, 16, 16))[1], rounding)
    folder_task(root).prepare_data()


def test_labels_outside_the_classes_are_named_by_value(root: Path) -> None:
    label = a_volume((16, 16, 16))[1]
    label[0, 0, :3] = (3, 7, 7)
    write_nifti(label_of(root), label)
    assert complaint(root) == (
        f"{label_of(root)} has the value(s) 3, 7, but data.classes is 2, so 0 to 1 are expected: "
        "relabel, or name every class"
    )
    folder_task(root, "data.classes=8").prepare_data()


def test_of_many_labels_none_escapes_the_check(root: Path) -> None:
    label = a_volume((16, 16, 16))[1]
    label.ravel()[:30] = range(30)
    write_nifti(label_of(root), label)
    assert "has the value(s) 25, 26, 27, 28, 29, but data.classes is 25" in complaint(root, "data.classes=25")
    folder_task(root, "data.classes=30").prepare_data()


@pytest.mark.parametrize(("values", "shown"), [([-1.0], "-1"), ([0.5], "0.5"), ([np.nan], "nan")])
def test_labels_that_are_no_class_numbers_are_named(root: Path, values: list[float], shown: str) -> None:
    label = a_volume((16, 16, 16))[1].astype(np.float32)
    label[0, 0, 0] = values[0]
    write_nifti(label_of(root), label)
    assert f"{label_of(root)} has the value(s) {shown}, but data.classes is 2" in complaint(root)


def test_an_image_given_as_label_shows_only_a_few_of_its_values(root: Path) -> None:
    write_nifti(label_of(root), a_volume((16, 16, 16))[0])
    assert complaint(root).count(",") < 12


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_voxels_that_are_no_numbers_are_named(root: Path, value: float) -> None:
    image = a_volume((16, 16, 16))[0]
    image[3, 4, 5] = value
    write_nifti(image_of(root), image)
    assert complaint(root) == (
        f"{image_of(root)} has voxels that are NaN or infinite: replace them, or remove the subject"
    )


def test_another_number_of_channels_is_named(root: Path) -> None:
    image, label = a_volume((16, 16, 16))
    last = root / "valid" / "valid-0"
    write_nifti(last / "img.nii.gz", np.stack([image] * 2, axis=-1))
    assert complaint(root) == f"{last}/img.nii.gz has 2 channel(s), but 1 expected: see data.in_channels"
    write_nifti(last / "img.nii.gz", image)
    write_nifti(last / "label.nii.gz", np.stack([label] * 2, axis=-1))
    assert complaint(root).startswith(f"{last}/label.nii.gz has 2 channels: a label has one")


def test_a_picture_is_no_volume(root: Path) -> None:
    write_nifti(image_of(root), np.zeros((16, 16), np.float32))
    assert complaint(root).startswith(f"{image_of(root)} has the shape 16×16: a volume has three sides")


@pytest.mark.parametrize("part", ["train", "valid"])
def test_labels_without_any_foreground_are_refused(root: Path, part: str) -> None:
    for label in (root / part).glob("*/label.nii.gz"):
        write_nifti(label, np.zeros((16, 16, 16), np.uint8))
    number, kind = (2, "training") if part == "train" else (1, "validation")
    assert complaint(root) == (
        f"none of the {number} {kind} labels has any foreground, {root}/{part}/{part}-0/label.nii.gz for example: "
        "are these the right files?"
    )


def test_a_class_that_nobody_has_is_mentioned(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "shardwise"):
        folder_task(root, "data.classes=[background, lesion, cyst]").prepare_data()
    assert "no training subject has the class(es) cyst" in caplog.text


def test_volumes_smaller_than_a_patch_are_padded_and_mentioned(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    task = folder_task(root, "data.spatial_mode=patches", "data.size=[32, 16, 16]")
    with caplog.at_level(logging.INFO, "shardwise"):
        task.prepare_data()
    assert "3 of 3 volumes are smaller than data.size [32, 16, 16], and are padded with zeros" in caplog.text
    assert f"{image_of(root)} is [16, 16, 16]" in caplog.text
    assert task.train_data()[0][0]["image"].shape == (1, 32, 16, 16)


# ---------------------------------------------------------------- what is remembered


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The subjects whose files were read to the end."""
    read: list[str] = []
    original = facts.inspect_files

    def counted(subject: Any) -> Any:
        read.append(subject.name)
        return original(subject)

    monkeypatch.setattr(facts, "inspect_files", counted)
    return read


def test_a_second_start_reads_no_file_again(root: Path, reads: list[str]) -> None:
    folder_task(root).prepare_data()
    assert sorted(reads) == ["train-0", "train-1", "valid-0"]
    reads.clear()
    folder_task(root).prepare_data()
    assert reads == []


def test_a_changed_file_is_read_again_and_other_settings_judge_the_same_facts(root: Path, reads: list[str]) -> None:
    folder_task(root, "data.classes=3").prepare_data()
    reads.clear()
    label = a_volume((16, 16, 16))[1]
    label[0, 0, 0] = 2
    write_nifti(label_of(root), label)
    folder_task(root, "data.classes=3").prepare_data()
    assert reads == ["train-0"]
    reads.clear()
    assert "has the value(s) 2" in complaint(root, "data.classes=2")
    assert reads == []


def test_facts_that_were_cut_off_are_found_again(root: Path, reads: list[str]) -> None:
    folder_task(root).prepare_data()
    reads.clear()
    for file in (cache_folder() / "segmentation" / "checked").iterdir():
        file.write_text(file.read_text()[:30])
    folder_task(root).prepare_data()
    assert sorted(reads) == ["train-0", "train-1", "valid-0"]


def test_a_bad_file_leaves_nothing_half_written(root: Path) -> None:
    image_of(root).write_bytes(image_of(root).read_bytes()[:500])
    complaint(root)
    kept = list((cache_folder() / "segmentation" / "checked").iterdir())
    assert len(kept) == 2 and all(file.suffix == ".json" and not file.name.startswith(".") for file in kept)


def test_news_are_told_while_many_files_are_read(
    root: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "SECONDS_BETWEEN_NEWS", 0.0)
    with caplog.at_level(logging.INFO, "shardwise"):
        folder_task(root).prepare_data()
    assert "checking the files: 1 of 3 subjects, about" in caplog.text
