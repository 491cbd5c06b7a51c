"""Reads a NIfTI file to its very end, or says in one sentence why it cannot be used. Nothing else in the task opens one.

The checksum of a .nii.gz stands behind its last byte. nibabel stops where the array ends and never compares it: most
flipped bits would pass as other voxels.
"""

from __future__ import annotations

import gzip
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import DataError, one_line

GZIP = b"\x1f\x8b"
CHUNK = 1 << 20
"""Bytes read at once of what follows the array."""
UNITS = {1: ("meter", 1000.0), 3: ("micron", 0.001)}
"""By their number in a header: their names, and how many mm they are. Without a unit, mm are meant."""


@dataclass(frozen=True)
class Grid:
    """Where the voxels of a file lie."""

    shape: tuple[int, int, int]
    channels: int
    affine: list[list[float]]
    """In mm."""
    oriented: bool = True
    """Whether the header says how the volume lies. Without, the affine is a guess."""
    two_sides: bool = False
    """Whether the header contradicts itself on which side is left: qform and sform are both set."""
    unit: str = "mm"
    """In which the header gives the affine."""

    def upright(self) -> tuple[tuple[int, int, int], tuple[float, float, float]]:
        """Shape and voxel size in mm, in the order left-right, back-front, down-up."""
        from nibabel import io_orientation
        from nibabel.affines import voxel_sizes

        axes = io_orientation(np.array(self.affine))[:, 0].astype(int)
        sizes = voxel_sizes(np.array(self.affine))
        shape, spacing = [0, 0, 0], [0.0, 0.0, 0.0]
        for place, axis in enumerate(axes):
            shape[axis], spacing[axis] = self.shape[place], float(sizes[place])
        return (shape[0], shape[1], shape[2]), (spacing[0], spacing[1], spacing[2])

    def resampled(self, spacing: Sequence[float] | None) -> tuple[int, ...]:
        """The upright shape with voxels of that size."""
        shape, sizes = self.upright()
        if spacing is None:
            return shape
        return tuple(max(1, round(side * size / to)) for side, size, to in zip(shape, sizes, spacing, strict=True))


def read_volume(file: Path) -> tuple[Grid, NDArray[Any]]:
    """Its grid and its voxels, [x, y, z] or [x, y, z, channels]. DataError where they are not to be trusted or used."""
    try:
        with _unpacked(file) as stream:
            volume = _on(stream, file)
            problem = _problem(volume)
            voxels = None if problem else np.asanyarray(volume.dataobj)
            # Also where there is a problem: in a damaged file the damage is the problem.
            while stream.read(CHUNK):
                pass
        if problem or voxels is None:
            raise DataError(f"{file} {problem}")
        return _grid(volume), voxels
    except DataError:
        raise
    except OSError as error:
        if error.errno is None:  # of gzip or nibabel, about what they read
            raise _damaged(file, error) from None
        raise DataError(f"{file} cannot be read ({error.strerror}): mend that, or remove the subject") from None
    except Exception as error:  # gzip, zlib, nibabel and numpy each have their own for a file that is damaged
        raise _damaged(file, error) from None


def by(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))


def mm(size: tuple[float, float, float]) -> str:
    return "×".join(f"{side:.4g}" for side in size) + " mm"


def _damaged(file: Path, error: Exception) -> DataError:
    reason = one_line(error) or type(error).__name__
    return DataError(f"{file} is damaged or no NIfTI file ({reason}): copy it again, or remove the subject")


@contextmanager
def _unpacked(file: Path) -> Iterator[IO[bytes]]:
    with file.open("rb") as raw:
        packed = raw.read(len(GZIP)) == GZIP
        raw.seek(0)
        if packed:
            with gzip.GzipFile(fileobj=raw) as stream:
                yield stream  # type: ignore[misc]  # it has all that is used of IO
        else:
            yield raw


def _on(stream: IO[bytes], file: Path) -> Any:
    """nibabel's image on the open file, which stays open, so that it can be read on behind the array."""
    import nibabel
    from nibabel.affines import voxel_sizes

    # It writes to the screen about headers, without the name of the file. What is wrong is told here.
    logging.getLogger("nibabel.global").setLevel(logging.CRITICAL + 1)
    start = stream.read(540)
    stream.seek(0)
    if start[344:348] == b"n+1\0":
        kind = nibabel.Nifti1Image
    elif start[4:8] == b"n+2\0":
        kind = nibabel.Nifti2Image
    else:
        # To the end: if the file is damaged, that is told instead.
        while stream.read(CHUNK):
            pass
        raise ValueError("it does not begin with the header of one" if start else "it is empty")
    # Not mapped: a file that is cut while it is read would end the process.
    volume = kind.from_file_map({"image": nibabel.FileHolder(str(file), stream)}, mmap=False)
    sizes = volume.header.get_zooms()[:3]
    if len(sizes) < 3 or not _usable(volume.affine) or np.allclose(sizes, voxel_sizes(volume.affine)):
        return volume
    # sform and voxel size contradict each other: if the qform does not, it holds, as everywhere in MONAI. Imported here,
    # because it takes seconds.
    from monai.data.utils import correct_nifti_header_if_necessary

    return correct_nifti_header_if_necessary(volume)


def _problem(volume: Any) -> str | None:
    """Why it cannot be a volume, from the header alone; the rest of a sentence that begins with the file."""
    from nibabel.nifti1 import data_type_codes

    shape = tuple(int(side) for side in volume.shape)
    if shape and not all(shape):
        return f"has no voxels, its shape is {by(shape)}: convert it again, or remove the subject"
    if (offset := int(volume.dataobj.offset)) < (least := volume.header.single_vox_offset):
        return (
            f"has a header by which its voxels begin at byte {offset}, inside of the header itself (vox_offset must be "
            f"{least} or more): convert it again, or remove the subject"
        )
    if len(shape) not in (3, 4):
        return f"has the shape {by(shape)}: a volume has three sides, and may have channels after them"
    if volume.get_data_dtype().kind not in "iuf":
        name = data_type_codes.label[int(volume.header["datatype"])]
        advice = "convert colours to grey values, or to channels in a fourth dimension"
        if volume.get_data_dtype().kind == "c":
            advice = "save their magnitude, or real and imaginary part as channels"
        return f"has voxels of the type {name}, but they must be plain numbers: {advice}"
    if not _usable(volume.affine):
        return (
            "has a header that does not say where its voxels lie (the affine is not finite, or flat): "
            "convert it again from the scanner's files, or remove the subject"
        )
    return None


def _usable(affine: NDArray[Any] | None) -> bool:
    if affine is None or not np.isfinite(affine).all():
        return False
    return bool(np.linalg.matrix_rank(affine[:3, :3]) == 3)


def _grid(volume: Any) -> Grid:
    shape = tuple(int(side) for side in volume.shape)
    header = volume.header
    oriented = bool(header["sform_code"] > 0 or header["qform_code"] > 0)
    channels = shape[3] if len(shape) == 4 else 1
    unit, size = UNITS.get(int(header["xyzt_units"]) & 7, ("mm", 1.0))
    affine = np.diag([size, size, size, 1.0]) @ np.asarray(volume.affine, float)
    two_sides = oriented and _two_sides(header)
    return Grid((shape[0], shape[1], shape[2]), channels, affine.tolist(), oriented, two_sides, unit)


def _two_sides(header: Any) -> bool:
    from nibabel import io_orientation

    if not (header["sform_code"] > 0 and header["qform_code"] > 0):
        return False
    try:
        axes = [io_orientation(form) for form in (header.get_sform(), header.get_qform())]
    except Exception:  # of a qform that is none; the sform holds
        return False
    sform, qform = (np.where(each[:, 0] == 0, each[:, 1], 0) for each in axes)  # 1 or -1 for the axis to the right
    return not np.array_equal(sform, qform)
