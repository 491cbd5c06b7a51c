"""Every file that cannot be trained on is named before the training, with what to do; what was read is remembered."""

from __future__ import annotations

import gzip
import logging
import struct
from pathlib import Path
from typing import Any

import nibabel
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


def test_a_header_without_orientation_is_said_to_be_the_reason(root: Path) -> None:
    nibabel.save(nibabel.Nifti1Image(a_volume((16, 16, 16))[0], None), image_of(root))
    message = complaint(root)
    assert message.startswith(f"{label_of(root)} lies ") and message.endswith(
        "(the header of img.nii.gz has no orientation, qform and sform code are 0): convert it again"
    )


def write_in_units(root: Path, size: float, unit: str | None) -> None:
    for file, voxels in zip((image_of(root), label_of(root)), a_volume((16, 16, 16)), strict=True):
        volume = nibabel.Nifti1Image(voxels, np.diag([size, size, size, 1]))
        volume.header.set_xyzt_units(unit)
        nibabel.save(volume, file)


@pytest.mark.parametrize(("size", "unit"), [(0.001, "meter"), (1000.0, "micron")])
def test_headers_in_other_units_are_resampled_as_those_in_millimetres(root: Path, size: float, unit: str) -> None:
    write_in_units(root, size, unit)
    settings = ["data.spacing=[1, 1, 1.7]", "data.spatial_mode=patches", "data.size=[8, 8, 8]"]
    task = folder_task(root, *settings)
    task.prepare_data()
    volumes = task.train_data().volumes
    assert volumes[0]["image"].shape == volumes[1]["image"].shape == (1, 16, 16, 10)


@pytest.mark.parametrize("mode", ["patches", "resize"])
@pytest.mark.parametrize(
    ("size", "unit", "said"),
    [
        (0.001, None, "0.001×0.001×0.001 mm, and 1×1×1 after data.spacing [1.0, 1.0, 2.0], which leaves nothing of it"),
        (
            1000.0,
            None,
            "1000×1000×1000 mm, and 16000×16000×8000 after data.spacing [1.0, 1.0, 2.0], which takes 15,259 GiB",
        ),
        (1.0, "meter", "1000×1000×1000 mm (its header is in meter), and 16000×16000×8000 after data.spacing"),
        (1.0, "micron", "0.001×0.001×0.001 mm (its header is in micron), and 1×1×1 after data.spacing"),
    ],
)
def test_a_size_after_resampling_that_cannot_be_meant_is_named(
    root: Path, size: float, unit: str | None, said: str, mode: str
) -> None:
    write_in_units(root, size, unit)
    message = complaint(root, "data.spacing=[1, 1, 2]", f"data.spatial_mode={mode}")
    assert message.startswith(f"{image_of(root)} has 16×16×16 voxels of {said}")
    assert message.endswith("mend size and unit of the voxels in its header, or set another data.spacing")
    folder_task(root).prepare_data()


def test_labels_outside_the_classes_are_named_by_value(root: Path) -> None:
    label = a_volume((16, 16, 16))[1]
    label[0, 0, :3] = (3, 7, 7)
    write_nifti(label_of(root), label)
    assert complaint(root) == (
        f"{label_of(root)} has the value(s) 3, 7, but there are 2 classes, so 0 to 1 are expected: "
        "relabel, or name every class in data.classes"
    )
    folder_task(root, "data.classes=8").prepare_data()


def test_of_many_labels_none_escapes_the_check(root: Path) -> None:
    label = a_volume((16, 16, 16))[1]
    label.ravel()[:30] = range(30)
    write_nifti(label_of(root), label)
    assert "has the value(s) 25, 26, 27, 28, 29, but there are 25 classes" in complaint(root, "data.classes=25")
    folder_task(root, "data.classes=30").prepare_data()


@pytest.mark.parametrize(("values", "shown"), [([-1.0], "-1"), ([0.5], "0.5"), ([np.nan], "nan")])
def test_labels_that_are_no_class_numbers_are_named(root: Path, values: list[float], shown: str) -> None:
    label = a_volume((16, 16, 16))[1].astype(np.float32)
    label[0, 0, 0] = values[0]
    write_nifti(label_of(root), label)
    assert f"{label_of(root)} has the value(s) {shown}, but there are 2 classes" in complaint(root)


@pytest.mark.parametrize("value", [1.0000001, 0.99998, 1.0005])
def test_a_label_that_rounding_has_touched_is_the_whole_number_it_means(root: Path, value: float) -> None:
    label = a_volume((16, 16, 16))[1].astype(np.float32)
    label[label == 1] = value
    write_nifti(label_of(root), label)
    task = folder_task(root)
    task.prepare_data()
    assert task.train_data()[0][0]["mask"].unique().tolist() == [0, 1]


def test_of_many_roundings_no_other_value_escapes(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As compression with loss leaves them: thousands of values near 0 come before the one that matters."""
    label = a_volume((16, 16, 16))[1] + np.random.default_rng(0).uniform(-9e-4, 9e-4, (16, 16, 16))
    assert len(np.unique(label)) > facts.MANY_VALUES
    write_nifti(label_of(root), label)
    folder_task(root).prepare_data()
    assert caplog.records == [], "the foreground is found, too"
    label[0, 0, 0] = 7
    write_nifti(label_of(root), label)
    assert f"{label_of(root)} has the value(s) 7, but there are 2 classes" in complaint(root)


@pytest.mark.parametrize(("value", "shown"), [(1.01, "1.01"), (0.9882353, "0.9882353"), (-0.4, "-0.4"), (1.9, "1.9")])
def test_a_label_between_two_whole_numbers_is_shown_with_all_its_digits(root: Path, value: float, shown: str) -> None:
    label = a_volume((16, 16, 16))[1].astype(np.float64)
    label[0, 0, 0] = value
    write_nifti(label_of(root), label)
    assert f"{label_of(root)} has the value(s) {shown}, but there are 2 classes" in complaint(root)


def write_scaled(file: Path, stored: Any, slope: float, inter: float) -> None:
    """As scanners and converters write: what counts is stored × slope + inter."""
    volume = nibabel.Nifti1Image(stored, np.eye(4))
    nibabel.save(volume, file)
    content = bytearray(gzip.decompress(file.read_bytes()))
    content[112:120] = struct.pack("<ff", slope, inter)
    file.write_bytes(gzip.compress(bytes(content)))


def test_scaled_labels_are_what_they_are_scaled_to(root: Path) -> None:
    label = a_volume((16, 16, 16))[1]
    write_scaled(label_of(root), (100 * label).astype(np.int16), 0.01, 0)
    task = folder_task(root, "data.flips=0")
    task.prepare_data()
    mask = task.train_data()[0][0]["mask"][0].numpy()
    assert np.array_equal(mask, label)
    write_scaled(label_of(root), label, 2, 0)
    assert "has the value(s) 2, but there are 2 classes" in complaint(root)
    write_scaled(label_of(root), label, 1, 1)
    assert "has the value(s) 2, but there are 2 classes" in complaint(root)
    write_scaled(label_of(root), label, 0.5, 0)
    assert "has the value(s) 0.5, but there are 2 classes" in complaint(root)
    write_scaled(label_of(root), label, 0, 7)  # no scaling, by the standard
    folder_task(root).prepare_data()


@pytest.mark.parametrize("dtype", ["u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f4", "f8"])
def test_labels_of_every_type_are_counted_alike(root: Path, dtype: str) -> None:
    label = a_volume((16, 16, 16))[1].astype(dtype)
    nibabel.save(nibabel.Nifti1Image(label, np.eye(4), dtype=label.dtype), label_of(root))
    task = folder_task(root, "data.flips=0")
    task.prepare_data()
    assert np.array_equal(task.train_data()[0][0]["mask"][0].numpy(), label)
    label[0, 0, 0] = 100
    nibabel.save(nibabel.Nifti1Image(label, np.eye(4), dtype=label.dtype), label_of(root))
    assert "has the value(s) 100, but there are 2 classes" in complaint(root)


@pytest.mark.parametrize("value", [300, 65536 + 1, 2**40, -(2**40)])
def test_a_label_that_would_wrap_around_to_a_class_is_named(root: Path, value: int) -> None:
    label = a_volume((16, 16, 16))[1].astype(np.int64)
    label[0, 0, 0] = value
    nibabel.save(nibabel.Nifti1Image(label, np.eye(4), dtype=np.int64), label_of(root))
    assert "value(s) " in complaint(root, "data.classes=255")


def test_an_image_given_as_label_shows_only_a_few_of_its_values(root: Path) -> None:
    write_nifti(label_of(root), a_volume((16, 16, 16))[0])
    message = complaint(root)
    assert message.count(",") < 12
    assert message.endswith("expected: is this an image? A label has the number of a class in each voxel")


def test_255_is_what_nobody_could_tell_or_the_white_of_a_picture(root: Path) -> None:
    label = a_volume((16, 16, 16))[1]
    write_nifti(label_of(root), 255 * label)
    assert complaint(root).endswith("where 255 means 1, as in masks that are saved as pictures, divide by 255")
    label[0] = 255
    write_nifti(label_of(root), label)
    assert complaint(root).endswith(
        "name every class in data.classes. 255 often means unknown: every voxel counts, so make it background, or a class "
        "of its own"
    )
    write_nifti(label_of(root), np.where(label == 255, 2, label))
    assert complaint(root).endswith("name every class in data.classes")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_voxels_that_are_no_numbers_are_named(root: Path, value: float) -> None:
    image = a_volume((16, 16, 16))[0]
    image[3, 4, 5] = value
    write_nifti(image_of(root), image)
    assert complaint(root) == (
        f"{image_of(root)} has voxels that are NaN or infinite: replace them, or remove the subject"
    )


def test_voxels_beyond_32_bits_are_named(root: Path) -> None:
    image = a_volume((16, 16, 16))[0].astype(np.float64)
    image[3, 4, 5] = -1e300
    write_nifti(image_of(root), image)
    assert complaint(root) == (
        f"{image_of(root)} has voxels up to 1e+300, more than a 32-bit number holds: scale them down"
    )


def far_out(image: Any, value: float, share: float) -> Any:
    chosen = np.random.default_rng(5).choice(image.size, max(1, round(share * image.size)), replace=False)
    changed = image.copy()
    changed.ravel()[chosen] = value
    return changed


@pytest.mark.parametrize(
    ("value", "share"), [(1e38, 0), (-3.4e38, 0), (-3.4e38, 0.3), (1e7, 0), (-1e10, 0.9), (1e9, 0.001)]
)
def test_voxels_so_far_out_that_the_others_look_alike_are_named(root: Path, value: float, share: float) -> None:
    image = a_volume((16, 16, 16))[0]
    write_nifti(image_of(root), far_out(image, value, share))
    message = complaint(root)
    assert message.startswith(
        f"{image_of(root)} has voxels of {value:g}, so far out that nearly all others, which lie "
    )
    assert message.endswith("replace such voxels, or set data.intensity_window")
    for way_out in ("data.intensity_window=[-1, 4]", "data.normalize=none"):
        folder_task(root, way_out).prepare_data()
    write_nifti(image_of(root), np.stack([image, far_out(image, value, share)], axis=-1))
    write_nifti(root / "train" / "train-1" / "img.nii.gz", np.stack([image, image], axis=-1))
    write_nifti(root / "valid" / "valid-0" / "img.nii.gz", np.stack([image, image], axis=-1))
    assert f"has voxels of {value:g} in channel 2, so far" in complaint(root)


def test_a_few_voxels_of_many_far_values_are_named_too(root: Path) -> None:
    image = a_volume((32, 32, 32))[0]
    image[3, 3, :10] = np.geomspace(1e7, 1e9, 10)
    write_nifti(image_of(root), image)
    write_nifti(label_of(root), a_volume((32, 32, 32))[1])
    assert f"{image_of(root)} has voxels of 1e+09, so far out" in complaint(root)


@pytest.mark.parametrize(
    "strange",
    [
        lambda image: far_out(image, 30, 0),
        lambda image: far_out(image, -30, 0.5),
        lambda image: far_out(image, 65535 / 1000, 1e-3),
        lambda image: np.where(image > 2, image, 0),
        lambda image: (image > 2).astype(np.uint8),
        lambda image: np.digitize(image, [1, 2]).astype(np.uint8),
    ],
    ids=["a hot voxel", "a fill below", "hot voxels", "little on black", "two values", "three values"],
)
def test_images_of_which_something_is_seen_are_let_through(
    root: Path, strange: Any, caplog: pytest.LogCaptureFixture
) -> None:
    write_nifti(image_of(root), strange(a_volume((16, 16, 16))[0]))
    folder_task(root).prepare_data()
    assert caplog.records == []


@pytest.mark.parametrize("value", [0, -1024])
def test_an_image_with_nothing_on_it_is_named(root: Path, value: int) -> None:
    write_nifti(image_of(root), np.full((16, 16, 16), value, np.int16))
    assert complaint(root) == (
        f"{image_of(root)} has the value {value} in every voxel: copy it again, or remove the subject"
    )


def test_an_image_outside_the_window_is_named(root: Path) -> None:
    """Scaled to 0 to 1 where the others are in HU, for example: of it, the window would leave one value."""
    for window in ("[1000, 1400]", "[-400, -100]"):
        message = complaint(root, f"data.intensity_window={window}")
        assert message.startswith(f"{image_of(root)} has intensities from -1.") and (
            f"all outside of data.intensity_window [{window[1:].split(',')[0]}.0, " in message
        )
    folder_task(root, "data.intensity_window=[1, 1400]").prepare_data()


def test_another_number_of_channels_is_named(root: Path) -> None:
    image, label = a_volume((16, 16, 16))
    last = root / "valid" / "valid-0"
    write_nifti(last / "img.nii.gz", np.stack([image] * 2, axis=-1))
    assert complaint(root) == f"{last}/img.nii.gz has 2 channel(s), but 1 expected: see data.in_channels"
    write_nifti(last / "img.nii.gz", image)
    write_nifti(last / "label.nii.gz", np.stack([label] * 2, axis=-1))
    assert complaint(root).startswith(f"{last}/label.nii.gz has 2 channels: a label has one")


@pytest.mark.parametrize("settings", [[], ["data.in_channels=3"]])
def test_channels_that_stand_first_are_called_that(tmp_path: Path, settings: list[str]) -> None:
    shape = (16, 12, 10)
    write_folder(tmp_path, train=1, valid=1, shape=shape)
    for number, folder in enumerate((tmp_path / "train" / "train-0", tmp_path / "valid" / "valid-0")):
        image, label = a_volume(shape, number)
        write_nifti(folder / "img.nii.gz", np.stack([image] * 3))
        if number:
            write_nifti(folder / "label.nii.gz", label[None])
    lines = complaint(tmp_path, *settings).splitlines()
    first, second = (line.strip() for line in lines)
    said = "img.nii.gz has the shape 3×16×12×10: the channels stand first; move them last (16×12×10×3)"
    assert (first, second) == (f"{tmp_path}/train/train-0/{said}", f"{tmp_path}/valid/valid-0/{said}")


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
