"""What can be trained on, but a careful person would want to know first: one warning, with a file named, or none."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwise.tasks.segmentation.subjects import AT_MOST
from tests.segmentation_task.files import a_volume, folder_task, msd_task, write_folder, write_msd, write_nifti

PATCHES = ["data.spatial_mode=patches", "data.size=[8, 8, 8]"]
TURNED = np.array([[0, 0, 1.0, 0], [3.0, 0, 0, 0], [0, 2.0, 0, 0], [0, 0, 0, 1]])
"""The same voxels, 1 mm from left to right, 3 from back to front and 2 upwards, with the axes in another order."""


def warnings_of(task: Any, caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.INFO, "shardwise"):
        task.prepare_data()
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def write_spaced(root: Path, affines: list[Any], part: str = "train") -> Path:
    for index, affine in enumerate(affines):
        image, label = a_volume((16, 16, 16), index)
        folder = root / part / f"{'s' if part == 'train' else 'v'}{index}"
        write_nifti(folder / "img.nii.gz", image, affine)
        write_nifti(folder / "label.nii.gz", label, affine)
    return root


# ---------------------------------------------------------------- voxels of different size


def test_patches_of_mixed_spacing_are_told_with_files_and_spacings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_spaced(tmp_path, [np.diag([1, 1, side, 1]) for side in (1, 2.5, 1, 1)])
    assert warnings_of(folder_task(tmp_path, *PATCHES), caplog) == [
        "voxels differ in size, but patches are cut as if they did not, so the same organ comes in different sizes; "
        "data.spacing resamples all volumes to one, [1, 1, 1] would be the middle:\n"
        f"  1×1×1 mm in 3 of 4 volumes, {first_of(tmp_path, {'s0', 's2', 's3'})} for example\n"
        f"  1×1×2.5 mm in 1 of 4 volumes, {tmp_path}/train/s1/img.nii.gz for example"
    ]


def first_of(root: Path, names: set[str]) -> Path:
    """In the order in which the task has them: those who are held out come last."""
    everybody = folder_task(root).subjects.all
    return next(subject.image for subject in everybody if subject.name in names)


def test_a_validation_volume_of_another_spacing_is_told_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_spaced(tmp_path, [np.eye(4)] * 2)
    write_spaced(tmp_path, [np.diag([2, 2, 2, 1])], "valid")
    (told,) = warnings_of(folder_task(tmp_path, *PATCHES), caplog)
    assert f"2×2×2 mm in 1 of 3 volumes, {tmp_path}/valid/v0/img.nii.gz for example" in told


def test_the_size_is_that_of_the_body_however_the_file_lies(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_spaced(tmp_path, [np.diag([1, 3, 2, 1]), TURNED, np.diag([-1, 3, -2, 1])])
    assert warnings_of(folder_task(tmp_path, *PATCHES), caplog) == []
    write_spaced(tmp_path, [np.diag([1, 3, 2, 1]), TURNED, np.diag([3, 1, 2, 1])])
    (told,) = warnings_of(folder_task(tmp_path, *PATCHES), caplog)
    assert "1×3×2 mm in 2 of 3 volumes" in told and "3×1×2 mm in 1 of 3 volumes" in told


@pytest.mark.parametrize(
    "settings",
    [[*PATCHES, "data.spacing=[1, 1, 2]"], ["data.spatial_mode=resize"]],
    ids=["resampled to one spacing", "scaled to one size anyway"],
)
def test_mixed_spacing_that_does_no_harm_needs_no_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, settings: list[str]
) -> None:
    write_spaced(tmp_path, [np.diag([1, 1, side, 1]) for side in (1, 2.5, 1)])
    assert warnings_of(folder_task(tmp_path, *settings), caplog) == []


def test_rounding_is_no_difference_and_more_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_spaced(tmp_path, [np.diag([1, 1, side, 1]) for side in (1, 1.004, 0.998)])
    assert warnings_of(folder_task(tmp_path, *PATCHES), caplog) == []
    write_spaced(tmp_path, [np.diag([1, 1, side, 1]) for side in (1, 1.05, 1)])
    assert len(warnings_of(folder_task(tmp_path, *PATCHES), caplog)) == 1


def test_many_sizes_are_one_warning_of_a_few_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_spaced(tmp_path, [np.diag([1, 1, 1 + index, 1]) for index in range(AT_MOST + 3)])
    (told,) = warnings_of(folder_task(tmp_path, *PATCHES), caplog)
    lines = told.splitlines()
    assert len(lines) == AT_MOST + 2 and lines[-1] == "  and 3 other sizes"


# ---------------------------------------------------------------- slices, channels, names


@pytest.mark.parametrize(("mode", "filled"), [("resize", "copies of it"), ("patches", "zeros")])
def test_a_single_slice_among_volumes_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: str, filled: str
) -> None:
    write_folder(tmp_path, train=2, valid=1)
    slice_ = tmp_path / "train" / "train-1"
    write_nifti(slice_ / "img.nii.gz", np.random.default_rng(0).normal(size=(16, 16, 1)).astype(np.float32))
    write_nifti(slice_ / "label.nii.gz", np.eye(16, dtype=np.uint8)[..., None])
    assert warnings_of(folder_task(tmp_path, f"data.spatial_mode={mode}"), caplog) == [
        f"1 of 3 volumes are a single slice, and {filled} fill data.size [16, 16, 16]: {slice_}/img.nii.gz is 16×16×1"
    ]
    sample = folder_task(tmp_path, f"data.spatial_mode={mode}").train_data()[1][0]
    assert sample["image"].shape == sample["mask"].shape == (1, 16, 16, 16)


@pytest.mark.parametrize("mode", ["resize", "patches"])
def test_a_spacing_that_leaves_a_single_slice_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    """A header in metres, for example."""
    write_spaced(tmp_path, [np.eye(4), np.eye(4), np.diag([0.001, 1, 1, 1])])
    settings = [f"data.spatial_mode={mode}", "data.spacing=[1, 1, 1]"]
    assert warnings_of(folder_task(tmp_path, *settings), caplog) == [
        "1 of 3 volumes are a single slice after data.spacing [1.0, 1.0, 1.0], and "
        f"{'zeros' if mode == 'patches' else 'copies of it'} fill data.size [16, 16, 16]: "
        f"{tmp_path}/train/s2/img.nii.gz is 1×16×16"
    ]


def test_a_fourth_dimension_that_nobody_has_named_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for part in ("train", "valid"):
        image, label = a_volume((16, 16, 16))
        write_nifti(tmp_path / part / part / "img.nii.gz", np.stack([image] * 5, axis=-1))
        write_nifti(tmp_path / part / part / "label.nii.gz", label)
    assert warnings_of(folder_task(tmp_path), caplog) == [
        f"the fourth dimension of the images is taken as 5 channels, {tmp_path}/train/train/img.nii.gz for example; "
        "if it is that and not time, data.in_channels: 5 says so"
    ]
    assert warnings_of(folder_task(tmp_path, "data.in_channels=5"), caplog) == []
    assert warnings_of(msd_task(write_msd(tmp_path / "msd", channels=2)), caplog) == [], "dataset.json names them"


@pytest.mark.parametrize("value", [0, -1024])
def test_a_channel_with_nothing_on_it_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture, value: int) -> None:
    for index, part in enumerate(("train", "valid")):
        image, label = a_volume((16, 16, 16), index)
        second = np.full_like(image, value) if index else image + 1
        write_nifti(tmp_path / part / part / "img.nii.gz", np.stack([image, second], axis=-1))
        write_nifti(tmp_path / part / part / "label.nii.gz", label)
    assert warnings_of(folder_task(tmp_path, "data.in_channels=2"), caplog) == [
        "1 of 2 images have nothing, or next to nothing, in a channel: "
        f"{tmp_path}/valid/valid/img.nii.gz has the value {value} in all voxels of channel 2, for example"
    ]


@pytest.mark.parametrize("spots", [[5], [5, -5], [1e38]])
def test_an_image_with_one_value_but_for_a_few_voxels_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, spots: list[float]
) -> None:
    write_folder(tmp_path, train=2, valid=1)
    image = np.full((16, 16, 16), 2, np.float32)
    image[3, 4, : len(spots)] = spots
    file = write_nifti(tmp_path / "train" / "train-0" / "img.nii.gz", image)
    assert warnings_of(folder_task(tmp_path), caplog) == [
        "1 of 3 images have nothing, or next to nothing, in a channel: "
        f"{file} has one value in all voxels but a few of channel 1, for example"
    ]


def test_the_same_name_in_both_parts_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_folder(tmp_path, train=2, valid=1)
    assert warnings_of(folder_task(tmp_path), caplog) == []
    (tmp_path / "valid" / "valid-0").rename(tmp_path / "valid" / "train-1")
    assert warnings_of(folder_task(tmp_path), caplog) == [
        f"1 validation subject(s) have the name of a training subject, {tmp_path}/valid/train-1 and "
        f"{tmp_path}/train/train-1 for example; if they are the same people, the validation is too good: "
        "remove them from one of the two"
    ]


@pytest.mark.parametrize("name", ["test", "vald"])
def test_subjects_beside_train_that_are_not_read_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    write_folder(tmp_path, train=3, valid=1)
    for other in ("notes", "__MACOSX", ".git"):
        (tmp_path / other).mkdir()
    assert warnings_of(folder_task(tmp_path), caplog) == []
    (tmp_path / "valid").rename(tmp_path / name)
    assert warnings_of(folder_task(tmp_path), caplog) == [
        f"{tmp_path}: {name}/ beside train/ is not read; 20% of the subjects in train/ are held out for validation. "
        "A folder valid/ would be validated on instead"
    ]
    write_folder(tmp_path, train=0, valid=1)
    assert warnings_of(folder_task(tmp_path), caplog) == [], "as it is with a test set beside both"


@pytest.mark.parametrize("name", ["background", "Background", "BG"])
def test_a_background_that_is_not_the_first_class_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    write_folder(tmp_path, train=2, valid=1)
    assert warnings_of(folder_task(tmp_path, f"data.classes=[lesion, {name}]"), caplog) == [
        f"class 1 is named '{name}', but the background is class 0, here 'lesion', which counts for no Dice: put the names "
        "in the order of the labels' numbers"
    ]
    assert warnings_of(folder_task(tmp_path, f"data.classes=[{name}, lesion]"), caplog) == []


def test_the_background_of_a_dataset_json_is_looked_at_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = write_msd(tmp_path) / "dataset.json"
    content = json.loads(file.read_text()) | {"labels": {"0": "tumour", "1": "left ventricle", "2": "background"}}
    file.write_text(json.dumps(content))
    assert warnings_of(msd_task(tmp_path), caplog)[0].startswith("class 2 is named 'background', but the background is")


# ---------------------------------------------------------------- labels of others, turned inside out, in another unit


def test_a_label_that_two_images_share_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train = write_folder(tmp_path) / "train"
    (train / "train-1/label.nii.gz").write_bytes((train / "train-0/label.nii.gz").read_bytes())
    (told,) = warnings_of(folder_task(tmp_path), caplog)
    assert told.startswith("2 of 6 labels are the same as that of another image, voxel by voxel: ")
    assert "train-0/label.nii.gz" in told and "train-1/label.nii.gz" in told


def test_labels_without_foreground_are_not_taken_for_copies(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("train-0", "train-1"):
        write_nifti(write_folder(tmp_path) / f"train/{name}/label.nii.gz", np.zeros((16, 16, 16), np.uint8))
    assert warnings_of(folder_task(tmp_path), caplog) == []


def test_a_label_that_is_turned_inside_out_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = write_folder(tmp_path) / "train/train-2/label.nii.gz"
    write_nifti(file, 1 - a_volume((16, 16, 16), 2)[1])
    (told,) = warnings_of(folder_task(tmp_path), caplog)
    assert told.startswith("1 of 6 labels are nearly all foreground, where the others have 3.05% of it: ")
    assert f"{file} has 97%" in told and "Are foreground and background changed over?" in told


WINDOW = "data.intensity_window=[-100, 250]"


@pytest.mark.parametrize(("settings", "told"), [([WINDOW], 1), (["data.normalize=none"], 1), ([], 0)])
def test_an_image_in_another_unit_is_told_where_that_matters(
    settings: list[str], told: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`zscore` makes them alike."""
    root = write_folder(tmp_path)
    for index, (part, number) in enumerate(
        (part, n) for part, many in (("train", 4), ("valid", 2)) for n in range(many)
    ):
        file = root / part / f"{part}-{number}" / "img.nii.gz"
        write_nifti(file, a_volume((16, 16, 16), index)[0] * (0.02 if file.parent.name == "train-3" else 50))
    said = warnings_of(folder_task(tmp_path, *settings), caplog)
    assert len(said) == told
    assert not told or f"1 of 6 images seem to be in another unit: nearly all voxels of {root}/train/train-3" in said[0]


def test_lists_that_are_shifted_against_each_other_are_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = write_msd(tmp_path, channels=1) / "dataset.json"
    content = json.loads(file.read_text())
    labels = [entry["label"] for entry in content["training"]]
    for entry, label in zip(content["training"], [*labels[1:], labels[0]], strict=True):
        entry["label"] = label
    file.write_text(json.dumps(content))
    told = [text for text in warnings_of(msd_task(tmp_path), caplog) if "name of another image" in text]
    assert len(told) == 1 and told[0].startswith("5 of 5 images are listed with a label that has the name of another")


def test_an_image_that_is_a_copy_of_its_label_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_folder(tmp_path) / "train/train-2"
    write_nifti(folder / "img.nii.gz", a_volume((16, 16, 16), 2)[1].astype(np.float32))
    told = [text for text in warnings_of(folder_task(tmp_path), caplog) if "same voxels as their label" in text]
    assert len(told) == 1 and told[0].startswith(
        f"1 of 6 images hold the same voxels as their label: {folder}/img.nii.gz"
    )
