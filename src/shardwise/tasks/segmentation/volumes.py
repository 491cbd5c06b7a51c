"""The data sets: a subject becomes tensors once per machine, and is cropped and flipped anew in every epoch."""

from __future__ import annotations

import hashlib
import json
import warnings
from pathlib import Path

import torch
from torch import Tensor

from shardwise.data.cache import cache_folder, made_once
from shardwise.errors import DataError
from shardwise.tasks.segmentation.check import stamp
from shardwise.tasks.segmentation.config import SegmentationData
from shardwise.tasks.segmentation.subjects import Subject
from shardwise.tasks.segmentation.transforms import fixed_transforms, random_transforms

VERSION = 1
"""Raised when the same settings would give other tensors."""

Volume = dict[str, Tensor]
"""image [channels, x, y, z], mask [1, x, y, z] and spacing [3] in mm."""


class Volumes:
    """Whole volumes after the fixed transforms."""

    def __init__(self, subjects: list[Subject], options: SegmentationData) -> None:
        self.subjects, self.options = subjects, options
        self.transforms = fixed_transforms(options)

    def __len__(self) -> int:
        return len(self.subjects)

    def __getitem__(self, index: int) -> Volume:
        subject = self.subjects[index]
        if not self.options.cache:
            return self._transformed(subject)
        file = self._cached(subject)
        made_once(file, lambda aside: torch.save(self._transformed(subject), aside))
        try:
            return _load(file)
        except Exception:  # a disk that was full, a machine that lost power: made again, and it must be right then
            file.unlink(missing_ok=True)
            made_once(file, lambda aside: torch.save(self._transformed(subject), aside))
            return _load(file)

    def _cached(self, subject: Subject) -> Path:
        """Its name follows from the files and from every setting that the result depends on."""
        kept = {"intensity_window", "normalize", "spacing", "spatial_mode"}
        settings = self.options.model_dump(
            include=kept | ({"size"} if self.options.spatial_mode == "resize" else set())
        )
        import monai

        key = json.dumps([VERSION, monai.__version__, stamp(subject.image, subject.label), settings], sort_keys=True)
        return cache_folder() / "segmentation" / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.pt"

    def _transformed(self, subject: Subject) -> Volume:
        try:
            made = self.transforms({"image": str(subject.image), "mask": str(subject.label)})
        except Exception as error:
            # MONAI's own message names the transform; what went wrong stands in the error that caused it.
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            raise DataError(f"{subject.image} or its label cannot be read: {type(cause).__name__}: {cause}") from error
        return {
            "image": made["image"].as_tensor().float().contiguous(),
            "mask": made["mask"].as_tensor().round().to(torch.uint8).contiguous(),
            "spacing": made["image"].pixdim.float(),
        }


class TrainVolumes:
    """A sample is a list: one volume, or several patches of it."""

    def __init__(self, volumes: Volumes) -> None:
        self.volumes = volumes
        self.transforms = random_transforms(volumes.options)

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


def _load(file: Path) -> Volume:
    # Mapped: a patch reads its own part of the image.
    return torch.load(file, map_location="cpu", mmap=True, weights_only=True)


def _plain(tensor: Tensor) -> Tensor:
    """Without MONAI's wrapper, which every operation of the training would have to carry along."""
    return tensor.as_subclass(Tensor)
