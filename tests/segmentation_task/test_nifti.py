"""A file is read to its end or refused by name: nothing that is damaged, and nothing that is no volume, is trained on."""

from __future__ import annotations

import contextlib
import gzip
import logging
import struct
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch

from shardwise.errors import DataError
from shardwise.tasks.segmentation import nifti
from shardwise.tasks.segmentation.check import check_subjects
from shardwise.tasks.segmentation.nifti import read_volume
from shardwise.tasks.segmentation.task import SegmentationTask
from tests.segmentation_task.files import a_volume, folder_task, write_folder, write_nifti

OBLIQUE = np.array([[0, -1.5, 0.2, 10], [2.0, 0, 0, -5], [0, 0, -3.0, 7], [0, 0, 0, 1]])
FLIPS = 200


def flips_of(content: bytes, seed: int) -> list[tuple[int, bytes]]:
    """(bit, the content with that bit flipped), for 200 bits."""
    bits = np.random.default_rng(seed).choice(8 * len(content), FLIPS, replace=False)
    damaged = []
    for bit in map(int, bits):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        damaged.append((bit, bytes(changed)))
    return damaged


def complaint(file: Path) -> str:
    with pytest.raises(DataError) as caught:
        read_volume(file)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["image", "label"])
def test_each_of_200_flipped_bits_is_an_error_or_changes_nothing(tmp_path: Path, kind: str) -> None:
    voxels = a_volume((12, 10, 8), seed=3)[kind == "label"]
    file = write_nifti(tmp_path / "volume.nii.gz", voxels, OBLIQUE)
    whole = read_volume(file)
    assert np.array_equal(whole[1], voxels) and np.allclose(whole[0].affine, OBLIQUE)
    refused = 0
    for bit, content in flips_of(file.read_bytes(), seed=0):
        file.write_bytes(content)
        try:
            grid, found = read_volume(file)
        except DataError as error:
            refused += 1
            assert str(error).startswith(f"{file} ") and "\n" not in str(error), bit
        else:
            assert grid == whole[0] and np.array_equal(found, whole[1]) and found.dtype == whole[1].dtype, bit
    # Only the name, the time and the system that gzip notes at the start carry nothing.
    assert refused > 0.7 * FLIPS


READERS: dict[str, Any] = {
    "the check at the start": lambda task: check_subjects(task.subjects.all, 2, None, task.data),
    "training": lambda task: task.train_data()[0],
    "validation": lambda task: task.valid_data()[0],
    "the shapes of the pictures and windows": lambda task: task._valid_shapes,
}


@pytest.mark.parametrize("cache", [True, False], ids=["cached", "not cached"])
@pytest.mark.parametrize("reader", READERS)
def test_every_reader_is_protected(tmp_path: Path, reader: str, cache: bool) -> None:
    """Where a checksum is the only thing that tells: the data itself unpacks without a complaint."""
    write_folder(tmp_path, train=1, valid=1, shape=(12, 10, 8))
    for part in ("train", "valid"):
        for name in ("img", "label"):
            file = tmp_path / part / f"{part}-0" / f"{name}.nii.gz"
            whole = file.read_bytes()
            file.write_bytes(whole[:-8] + bytes([whole[-8] ^ 1]) + whole[-7:])
    task = folder_task(tmp_path, f"data.cache={str(cache).lower()}", "data.in_channels=1", "data.spatial_mode=patches")
    with pytest.raises(DataError) as caught:
        READERS[reader](task)
    part = "train" if reader in ("training", "the check at the start") else "valid"
    assert str(caught.value).startswith(
        f"{tmp_path}/{part}/{part}-0/img.nii.gz is damaged or no NIfTI file (CRC check failed"
    )


@pytest.mark.parametrize("cache", ["true", "false"])
def test_a_file_that_was_damaged_after_the_check_is_not_trained_on(tmp_path: Path, cache: str) -> None:
    write_folder(tmp_path, train=2, valid=1, shape=(12, 10, 8))
    task = folder_task(tmp_path, f"data.cache={cache}")
    task.prepare_data()
    file = tmp_path / "train" / "train-0" / "img.nii.gz"
    content = file.read_bytes()
    data = task.train_data()
    for _, damaged in flips_of(content, seed=1)[:20]:
        file.write_bytes(damaged)
        try:
            data[0]
        except DataError as error:
            assert str(error).startswith(f"{file} ")
        else:
            _, found = read_volume(file)
            assert np.array_equal(found, a_volume((12, 10, 8), 0)[0])


def test_what_stands_behind_the_end_of_a_packed_file_is_damage(tmp_path: Path) -> None:
    file = write_nifti(tmp_path / "volume.nii.gz", a_volume((8, 8, 8))[0])
    content = file.read_bytes()
    file.write_bytes(content + b"left over from a longer file")
    assert complaint(file).startswith(f"{file} is damaged or no NIfTI file (Not a gzipped file")
    file.write_bytes(content + bytes(512))  # a tape fills its last block with zeros
    assert np.array_equal(read_volume(file)[1], a_volume((8, 8, 8))[0])


@pytest.mark.parametrize("length", [0, 1, 10, 200, 400, -9, -8, -4, -1])
@pytest.mark.parametrize("ending", [".nii.gz", ".nii"])
def test_a_file_that_is_cut_off_anywhere_is_named(tmp_path: Path, ending: str, length: int) -> None:
    file = write_nifti(tmp_path / f"volume{ending}", a_volume((8, 8, 8))[0])
    file.write_bytes(file.read_bytes()[:length])
    assert complaint(file).startswith(f"{file} is damaged or no NIfTI file (")


def test_packed_or_not_is_told_by_the_content(tmp_path: Path) -> None:
    """Some tools name a file that they have not packed .nii.gz."""
    file = write_nifti(tmp_path / "plain.nii", a_volume((8, 8, 8))[0])
    misnamed = file.rename(tmp_path / "plain.nii.gz")
    packed = tmp_path / "packed.nii"
    packed.write_bytes(gzip.compress(misnamed.read_bytes()))
    for each in (misnamed, packed):
        assert np.array_equal(read_volume(each)[1], a_volume((8, 8, 8))[0])


def test_a_file_that_is_no_nifti_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "img.nii.gz"
    file.write_bytes(gzip.compress(b"<html>404</html>" * 100))
    assert complaint(file) == (
        f"{file} is damaged or no NIfTI file (it does not begin with the header of one): copy it again, or remove the "
        "subject"
    )
    file.write_bytes(b"")
    assert "(it is empty)" in complaint(file)


def test_a_file_that_may_not_be_read_is_not_called_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_nifti(tmp_path / "img.nii.gz", a_volume((8, 8, 8))[0])

    def refused(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refused)
    assert complaint(file) == f"{file} cannot be read (Permission denied): mend that, or remove the subject"


# ---------------------------------------------------------------- types of voxels


@pytest.mark.parametrize("dtype", ["u1", "i1", "<i2", ">i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f4", ">f4", "<f8"])
def test_numbers_of_every_type_are_read_as_monai_reads_them(tmp_path: Path, dtype: str) -> None:
    from monai.transforms import LoadImage

    voxels = (100 * a_volume((9, 8, 7))[0].clip(0, 1)).astype(dtype)
    header = nibabel.Nifti1Header(endianness=">" if dtype.startswith(">") else "<")
    file = tmp_path / "train" / "a" / "img.nii.gz"
    file.parent.mkdir(parents=True)
    nibabel.save(nibabel.Nifti1Image(voxels, OBLIQUE, header, dtype=voxels.dtype), file)
    from shardwise.tasks.segmentation.volumes import _read

    wanted = LoadImage(reader="NibabelReader", ensure_channel_first=True)(str(file))
    found = _read(file)
    assert torch.equal(found.as_tensor(), wanted.as_tensor()) and torch.equal(found.affine, wanted.affine)


@pytest.mark.parametrize("shape", [(9, 8, 7, 3), (9, 8, 7, 1)])
def test_channels_are_read_as_monai_reads_them(tmp_path: Path, shape: tuple[int, ...]) -> None:
    from monai.transforms import LoadImage

    from shardwise.tasks.segmentation.volumes import _read

    file = write_nifti(tmp_path / "img.nii.gz", np.random.default_rng(0).normal(size=shape).astype("f4"), OBLIQUE)
    wanted = LoadImage(reader="NibabelReader", ensure_channel_first=True)(str(file))
    found = _read(file)
    assert torch.equal(found.as_tensor(), wanted.as_tensor()) and torch.equal(found.affine, wanted.affine)


def test_scaled_numbers_are_scaled(tmp_path: Path) -> None:
    volume = nibabel.Nifti1Image(np.arange(60, dtype=np.int16).reshape(3, 4, 5), np.eye(4))
    volume.header.set_slope_inter(2.0, -1024)
    nibabel.save(volume, tmp_path / "ct.nii.gz")
    stored = nibabel.load(tmp_path / "ct.nii.gz")
    assert stored.dataobj.slope == 2.0 and stored.dataobj.inter == -1024
    assert np.array_equal(read_volume(tmp_path / "ct.nii.gz")[1], np.asarray(stored.dataobj))


COLOURS = {
    "RGB": np.dtype([("R", "u1"), ("G", "u1"), ("B", "u1")]),
    "RGBA": np.dtype([("R", "u1"), ("G", "u1"), ("B", "u1"), ("A", "u1")]),
}


@pytest.mark.parametrize("name", ["RGB", "RGBA", "complex64", "complex128"])
@pytest.mark.parametrize("which", ["img", "label"])
def test_voxels_that_are_no_plain_numbers_are_refused_by_name(tmp_path: Path, which: str, name: str) -> None:
    write_folder(tmp_path, train=2, valid=1)
    file = tmp_path / "train" / "train-0" / f"{which}.nii.gz"
    write_nifti(file, np.zeros((16, 16, 16), COLOURS.get(name, name)))
    with pytest.raises(DataError) as caught:
        folder_task(tmp_path).prepare_data()
    assert str(caught.value).startswith(f"{file} has voxels of the type {name}, but they must be plain numbers: ")
    assert ("grey values" if name in COLOURS else "magnitude") in str(caught.value) and "\n" not in str(caught.value)


def test_a_type_that_nobody_knows_is_an_error_with_the_file(tmp_path: Path) -> None:
    file = write_nifti(tmp_path / "img.nii", a_volume((8, 8, 8))[0])
    content = bytearray(file.read_bytes())
    for number in (0, 1, 1536, 2048, 999):
        content[70:72] = struct.pack("<h", number)
        file.write_bytes(content)
        assert complaint(file).startswith(f"{file} "), number


# ---------------------------------------------------------------- shapes and places


@pytest.mark.parametrize("shape", [(5,), (8, 8), (8, 8, 8, 1, 3)])
def test_what_has_not_three_sides_is_no_volume(tmp_path: Path, shape: tuple[int, ...]) -> None:
    file = write_nifti(tmp_path / "img.nii.gz", np.zeros(shape, np.float32))
    assert complaint(file).startswith(f"{file} has the shape {'×'.join(map(str, shape))}: a volume has three sides")


@pytest.mark.parametrize("shape", [(8, 8, 0), (0, 8, 8, 2)])
def test_a_volume_without_voxels_is_called_that(tmp_path: Path, shape: tuple[int, ...]) -> None:
    file = write_nifti(tmp_path / "img.nii.gz", np.zeros(shape, np.float32))
    assert complaint(file) == (
        f"{file} has no voxels, its shape is {'×'.join(map(str, shape))}: convert it again, or remove the subject"
    )


@pytest.mark.parametrize(("kind", "place", "least"), [(nibabel.Nifti1Image, 108, 352), (nibabel.Nifti2Image, 168, 544)])
def test_voxels_that_begin_inside_of_the_header_are_refused(tmp_path: Path, kind: Any, place: int, least: int) -> None:
    """The bytes of the header would be voxels."""
    file = tmp_path / "img.nii"
    nibabel.save(kind(a_volume((8, 8, 8))[0], np.eye(4)), file)
    content = bytearray(file.read_bytes())
    content[place : place + 8 if least == 544 else place + 4] = struct.pack("<q" if least == 544 else "<f", 0)
    file.write_bytes(content)
    assert complaint(file) == (
        f"{file} has a header by which its voxels begin at byte 0, inside of the header itself (vox_offset must be {least} "
        "or more): convert it again, or remove the subject"
    )


def test_nibabel_writes_nothing_to_the_screen(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It would not name the file."""
    file = write_nifti(tmp_path / "img.nii", a_volume((8, 8, 8))[0])
    content = file.read_bytes()
    for place, what in ((108, struct.pack("<f", 356)), (70, struct.pack("<h", 1)), (88, struct.pack("<f", 0))):
        file.write_bytes(content[:place] + what + content[place + len(what) :] + bytes(4))
        with contextlib.suppress(DataError):
            read_volume(file)
    assert not logging.getLogger("nibabel.global").isEnabledFor(logging.CRITICAL)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("unit", "size"), [("meter", 0.002), ("micron", 2000.0), ("mm", 2.0), (None, 2.0)])
def test_places_are_in_millimetres_whatever_unit_the_header_is_in(tmp_path: Path, unit: str, size: float) -> None:
    affine = np.diag([size, size, 2 * size, 1])
    affine[:3, 3] = (size, 0, -size)
    volume = nibabel.Nifti1Image(a_volume((8, 8, 8))[0], affine)
    volume.header.set_xyzt_units(unit)
    nibabel.save(volume, tmp_path / "img.nii.gz")
    wanted = [[2, 0, 0, 2], [0, 2, 0, 0], [0, 0, 4, -2], [0, 0, 0, 1]]
    assert np.allclose(read_volume(tmp_path / "img.nii.gz")[0].affine, wanted)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, 0.0])
def test_a_header_that_does_not_say_where_the_voxels_lie_is_refused(tmp_path: Path, wrong: float) -> None:
    file = write_nifti(tmp_path / "img.nii", a_volume((8, 8, 8))[0])
    content = bytearray(file.read_bytes())
    content[280:284] = struct.pack("<f", wrong)  # the first number of the affine
    file.write_bytes(content)
    assert complaint(file).startswith(f"{file} has a header that does not say where its voxels lie (the affine is not")


def test_where_the_header_contradicts_itself_the_place_is_that_of_monai(tmp_path: Path) -> None:
    from monai.transforms import LoadImage

    volume = nibabel.Nifti1Image(a_volume((8, 8, 8))[0], np.diag([2.0, 2, 3, 1]))
    volume.set_qform(np.diag([2.0, 2, 3, 1]), code=1)
    file = tmp_path / "img.nii"
    nibabel.save(volume, file)
    content = bytearray(file.read_bytes())
    content[280:284] = struct.pack("<f", 9.0)  # of the sform
    file.write_bytes(content)
    assert nibabel.load(file).affine[0, 0] == 9
    found = np.array(read_volume(file)[0].affine)
    assert np.array_equal(found, LoadImage(reader="NibabelReader")(str(file)).affine.numpy()) and found[0, 0] == 2


def test_sides_and_sizes_are_told_in_one_order_however_a_file_is_turned(tmp_path: Path) -> None:
    grid, _ = read_volume(write_nifti(tmp_path / "a.nii.gz", np.zeros((4, 5, 6), np.float32), OBLIQUE))
    shape, size = grid.upright()
    assert shape == (5, 4, 6) and np.allclose(size, (1.5, 2.0, 3.0), atol=0.01) and grid.oriented
    assert not read_volume(write_plain(tmp_path / "b.nii.gz"))[0].oriented


def write_plain(file: Path) -> Path:
    """Neither qform nor sform."""
    volume = nibabel.Nifti1Image(a_volume((16, 16, 16))[0], None)
    assert volume.header["sform_code"] == volume.header["qform_code"] == 0
    nibabel.save(volume, file)
    return file


def test_a_file_is_read_once_for_the_check_and_once_for_the_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    original = nifti._unpacked

    def counted(file: Path) -> Any:
        opened.append(file.parent.name + "/" + file.name)
        return original(file)

    monkeypatch.setattr(nifti, "_unpacked", counted)
    write_folder(tmp_path, train=2, valid=1)
    for _ in range(2):  # two starts, of which each sees each volume twice
        task: SegmentationTask = folder_task(tmp_path)
        task.prepare_data()
        for data in (task.train_data(), task.valid_data()):
            for index in [*range(len(data)), *range(len(data))]:
                data[index]
    assert len(opened) == 2 * 6 and all(opened.count(name) == 2 for name in opened)
