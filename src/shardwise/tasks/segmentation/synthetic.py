"""Volumes with lesions, made from the seed and written as NIfTI files, so that they are read as real ones are."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shardwise.config.seeds import Purpose
from shardwise.data.cache import cache_folder, made_once
from shardwise.tasks.segmentation.config import SegmentationData

log = logging.getLogger(__name__)

VERSION = 1
"""Raised when the same settings would give other volumes."""


def make_synthetic(options: SegmentationData, seed: int) -> None:
    """The files, if they are not there yet."""
    root = synthetic_root(options, seed)
    if not root.exists():
        log.info(f"making {options.num_subjects} synthetic volumes in {root}")
    made_once(root, lambda folder: _write(options, seed, folder))


def synthetic_root(options: SegmentationData, seed: int) -> Path:
    settings = [VERSION, seed, options.num_subjects, options.volume_size, _classes(options)]
    digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:12]
    return cache_folder() / "synthetic" / f"segmentation-{digest}"


def synthetic_subjects(options: SegmentationData) -> list[str]:
    return [f"subject-{index:03d}" for index in range(options.num_subjects)]


def _classes(options: SegmentationData) -> int:
    return len(options.classes) if isinstance(options.classes, list) else options.classes or 2


def _write(options: SegmentationData, seed: int, root: Path) -> None:
    import nibabel

    for index, name in enumerate(synthetic_subjects(options)):
        image, label = _volume(np.random.default_rng([seed, Purpose.DATA, index]), options)
        folder = root / "train" / name
        folder.mkdir(parents=True)
        for file, voxels in (("img", image), ("label", label)):
            nibabel.save(nibabel.Nifti1Image(voxels, np.eye(4)), folder / f"{file}.nii.gz")


def _volume(rng: np.random.Generator, options: SegmentationData) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """Noise with ellipsoids in it. The noise is as strong as a lesion is bright, so that no single voxel tells; odd
    classes are brighter than the tissue around them, even ones darker."""
    shape = tuple(int(rng.integers(max(8, round(0.8 * side)), side + 1)) for side in options.volume_size)
    image = rng.normal(0.0, 1.0, shape).astype(np.float32)
    label = np.zeros(shape, np.uint8)
    grid = np.stack(np.meshgrid(*(np.arange(side) for side in shape), indexing="ij"), axis=-1)
    for number in range(1, _classes(options)):
        strength = (1.0 if number % 2 else -1.0) * (1 + (number - 1) // 2)
        for _ in range(rng.integers(1, 3)):
            radii = rng.uniform(0.12, 0.22, 3) * shape
            centre = rng.uniform(radii, np.array(shape) - 1 - radii)
            inside = (((grid - centre) / radii) ** 2).sum(axis=-1) <= 1
            image[inside & (label == 0)] += 1.5 * strength
            label[inside & (label == 0)] = number
    return image, label
