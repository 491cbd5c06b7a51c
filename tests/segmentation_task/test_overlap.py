"""A scan that is trained on and validated on is found, however its copy is stored."""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Callable
from pathlib import Path

import nibabel
import numpy as np
import pytest

from shardwise.data.overlap import check_overlap
from shardwise.errors import DataError
from shardwise.tasks.segmentation import facts
from tests.segmentation_task.files import a_volume, folder_task, write_folder, write_nifti, write_subject


def compare(root: Path, *overrides: str) -> None:
    task = folder_task(root, *overrides)
    task.prepare_data()
    check_overlap(task.sample_contents(None, None), allowed=False)


def packed_anew(image: Path) -> None:
    image.write_bytes(gzip.compress(gzip.decompress(image.read_bytes()), 1))


def unpacked(image: Path) -> None:
    image.with_suffix("").write_bytes(gzip.decompress(image.read_bytes()))
    image.unlink()


def as_another_type(image: Path) -> None:
    write_nifti(image, np.asarray(nibabel.load(image).dataobj).astype(np.float64))


def with_big_ends(image: Path) -> None:
    header = nibabel.Nifti1Header(endianness=">")
    voxels = np.asarray(nibabel.load(image).dataobj)
    nibabel.save(nibabel.Nifti1Image(voxels, np.eye(4), header, dtype=voxels.dtype.newbyteorder(">")), image)


def as_nifti2(image: Path) -> None:
    nibabel.save(nibabel.Nifti2Image(np.asarray(nibabel.load(image).dataobj), np.eye(4)), image)


def scaled(image: Path) -> None:
    volume = nibabel.Nifti1Image((4 * np.asarray(nibabel.load(image).dataobj)).astype(np.int32), np.eye(4))
    nibabel.save(volume, image)
    content = bytearray(gzip.decompress(image.read_bytes()))
    content[112:120] = np.array([0.25, 0], "<f4").tobytes()
    image.write_bytes(gzip.compress(bytes(content)))


def with_negative_zeros(image: Path) -> None:
    voxels = np.asarray(nibabel.load(image).dataobj).astype(np.float32)
    assert (voxels == 0).any()
    write_nifti(image, np.where(voxels == 0, np.float32(-0.0), voxels))


def with_a_fourth_dimension(image: Path) -> None:
    write_nifti(image, np.asarray(nibabel.load(image).dataobj)[..., None])


def with_another_header(image: Path) -> None:
    affine = np.diag([-1.0, 1, 3, 1])
    affine[0, 3] = 40
    for name in ("img", "label"):
        file = image.with_name(f"{name}.nii.gz")
        write_nifti(file, np.asarray(nibabel.load(file).dataobj), affine)


def whole_numbers(root: Path) -> Path:
    """As of a scanner, so that every type holds them."""
    write_folder(root, train=3, valid=2)
    for image in root.glob("*/*/img.nii.gz"):
        voxels = np.asarray(nibabel.load(image).dataobj)
        write_nifti(image, np.round(100 * voxels).astype(np.int16))
    return root


STORED_ANEW = [
    *(packed_anew, unpacked, as_another_type, with_big_ends, as_nifti2, scaled),
    *(with_negative_zeros, with_a_fourth_dimension, with_another_header),
]


@pytest.mark.parametrize("store", STORED_ANEW, ids=lambda store: store.__name__)
def test_a_copy_is_found_however_it_is_stored(tmp_path: Path, store: Callable[[Path], None]) -> None:
    root = whole_numbers(tmp_path)
    compare(root)
    shutil.copytree(root / "train" / "train-1", root / "valid" / "again")
    before = (root / "valid" / "again" / "img.nii.gz").read_bytes()
    store(root / "valid" / "again" / "img.nii.gz")
    (image,) = (root / "valid" / "again").glob("img.nii*")
    assert image.read_bytes() != before
    with pytest.raises(DataError) as caught:
        compare(root)
    assert str(caught.value).startswith(
        f"1 of 3 validation subjects (33%) is in the training data, too: {image} is the same as "
        f"{root}/train/train-1/img.nii.gz. What is trained on cannot be used to validate: take them out of one of the two"
    )


def test_one_voxel_makes_another_image(tmp_path: Path) -> None:
    root = whole_numbers(tmp_path)
    shutil.copytree(root / "train" / "train-1", root / "valid" / "again")
    image = root / "valid" / "again" / "img.nii.gz"
    voxels = np.asarray(nibabel.load(image).dataobj).copy()
    voxels[3, 4, 5] += 1
    write_nifti(image, voxels)
    compare(root)


def test_the_same_numbers_in_another_shape_are_another_image(tmp_path: Path) -> None:
    image, label = a_volume((16, 16, 16))
    for part, shape in (("train", (16, 16, 16)), ("valid", (16, 8, 32))):
        write_nifti(tmp_path / part / part / "img.nii.gz", image.reshape(shape, order="F"))
        write_nifti(tmp_path / part / part / "label.nii.gz", label.reshape(shape, order="F"))
    compare(tmp_path)


def test_a_channel_more_makes_another_image(tmp_path: Path) -> None:
    image, label = a_volume((16, 16, 16))
    for part, channels in (("train", [image, image]), ("valid", [image, image + 1])):
        write_nifti(tmp_path / part / part / "img.nii.gz", np.stack(channels, axis=-1))
        write_nifti(tmp_path / part / part / "label.nii.gz", label)
    compare(tmp_path, "data.in_channels=2")


def test_copies_in_one_pool_that_the_seed_parts_are_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for index in range(4):
        for name in ("a", "b"):
            write_subject(tmp_path / "train" / f"{name}-{index}", seed=index)
        packed_anew(tmp_path / "train" / f"b-{index}" / "img.nii.gz")
    compare(tmp_path, "data.valid_fraction=0.5")
    assert "The seed held them out of data with copies in it" in caplog.text


def test_a_second_start_compares_without_reading_a_volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_folder(tmp_path, train=2, valid=1)
    compare(root)

    def refused(*_: object) -> None:
        raise AssertionError("a volume is read again")

    monkeypatch.setattr(facts, "read_volume", refused)
    compare(root)
