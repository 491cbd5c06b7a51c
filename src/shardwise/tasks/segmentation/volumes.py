"""The data sets: a subject becomes tensors once per machine, and is cropped and flipped anew in every epoch."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwise.data.cache import cache_folder, cache_name, code_stamp, file_stamp, made_once
from shardwise.errors import DataError
from shardwise.tasks.segmentation import nifti, transforms
from shardwise.tasks.segmentation.check import check_again
from shardwise.tasks.segmentation.config import SegmentationData
from shardwise.tasks.segmentation.nifti import read_volume
from shardwise.tasks.segmentation.subjects import Subject
from shardwise.tasks.segmentation.transforms import fixed_settings, fixed_transforms, random_transforms

Volume = dict[str, Tensor]
"""image [channels, x, y, z], mask [1, x, y, z] and spacing [3] in mm."""


class Volumes:
    """Whole volumes after the fixed transforms."""

    def __init__(self, subjects: list[Subject], options: SegmentationData, classes: int, channels: int) -> None:
        self.subjects, self.options = subjects, options
        self.classes, self.channels = classes, channels
        self.transforms = fixed_transforms(options)

    def __len__(self) -> int:
        return len(self.subjects)

    def __getitem__(self, index: int) -> Volume:
        subject = self.subjects[index]
        if not self.options.cache:
            return self._transformed(subject)
        file = self._cached(subject)
        make = partial(self._save, subject)
        made_once(file, make)
        try:
            return _load(file)
        except Exception:  # a disk that was full, a machine that lost power: made again, and it must be right then
            file.unlink(missing_ok=True)
            return _load(made_once(file, make))

    def _save(self, subject: Subject, aside: Path) -> None:
        torch.save(self._transformed(subject), aside)

    def _cached(self, subject: Subject) -> Path:
        """Its name follows from the files, and from all code and settings that the result depends on: what was made of
        others is never found."""
        import monai
        import nibabel

        code = [code_stamp(__file__, nifti.__file__, transforms.__file__), torch.__version__]
        others = [monai.__version__, nibabel.__version__, np.__version__]
        files = file_stamp(subject.image, subject.label)
        name = cache_name(code, others, files, fixed_settings(self.options))
        return cache_folder() / "segmentation" / f"{name}.pt"

    def _transformed(self, subject: Subject) -> Volume:
        check_again(subject, self.classes, self.channels, self.options)
        files = {"image": subject.image, "mask": subject.label}
        volumes = {key: _read(file) for key, file in files.items()}
        try:
            made = self.transforms(volumes)
        except Exception as error:
            # MONAI's own message names the transform; what went wrong stands in the error that caused it.
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            raise DataError(
                f"{subject.image} or its label cannot be transformed: {type(cause).__name__}: {cause}"
            ) from error
        return {
            "image": made["image"].as_tensor().float().contiguous(),
            "mask": made["mask"].as_tensor().round().to(torch.uint8).contiguous(),
            "spacing": made["image"].pixdim.float(),
        }


class TrainVolumes:
    """A sample is a list: one volume, or several patches of it."""

    def __init__(self, volumes: Volumes, flips: Sequence[float]) -> None:
        self.volumes = volumes
        self.transforms = random_transforms(volumes.options, flips)

    def __len__(self) -> int:
        return len(self.volumes)

    def __getitem__(self, index: int) -> list[Volume]:
        volume = self.volumes[index]
        # MONAI draws from a state of its own; torch's generator here follows from (seed, epoch, sample).
        self.transforms.set_random_state(seed=int(torch.randint(2**31, ())))
        with warnings.catch_warnings():
            # A subject without foreground is cropped anywhere, which is right and needs no mention in every epoch.
            warnings.filterwarnings("ignore", message="Num foregrounds")
            made = self.transforms({"image": volume["image"], "mask": volume["mask"]})
        return [
            {key: _plain(part[key]) for key in ("image", "mask")}
            for part in (made if isinstance(made, list) else [made])
        ]


class ValidVolumes:
    """A sample is a whole volume and its number."""

    def __init__(self, volumes: Volumes) -> None:
        self.volumes = volumes

    def __len__(self) -> int:
        return len(self.volumes)

    def __getitem__(self, index: int) -> Volume:
        return {**self.volumes[index], "index": torch.tensor(index)}


def _read(file: Path) -> Any:
    """As MONAI's LoadImage with ensure_channel_first gives it."""
    from monai.data import MetaTensor

    grid, voxels = read_volume(file)
    # In native order: torch has no other.
    tensor = torch.from_numpy(np.ascontiguousarray(voxels, dtype=np.float32))
    channel_first = tensor.unsqueeze(0) if tensor.ndim == 3 else tensor.movedim(-1, 0)
    return MetaTensor(channel_first, affine=torch.tensor(grid.affine, dtype=torch.float64))


def _load(file: Path) -> Volume:
    # Mapped: a patch reads its own part of the image.
    return torch.load(file, map_location="cpu", mmap=True, weights_only=True)


def _plain(tensor: Tensor) -> Tensor:
    """Without MONAI's wrapper, which every operation of the training would have to carry along."""
    return tensor.as_subclass(Tensor)
