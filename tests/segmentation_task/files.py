"""Small NIfTI files, right ones and wrong ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nibabel
import numpy as np

from shardwise.tasks.segmentation.task import SegmentationTask
from tests.tasks import config_of


def write_nifti(file: Path, voxels: Any, affine: Any = None) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(np.asarray(voxels), np.eye(4) if affine is None else np.asarray(affine)), file)
    return file


def a_volume(shape: tuple[int, ...], seed: int = 0, classes: int = 2) -> tuple[Any, Any]:
    """Noise in which each class is a box of its own brightness."""
    rng = np.random.default_rng(seed)
    label = np.zeros(shape, np.uint8)
    for number in range(1, classes):
        corner = [int(rng.integers(0, side // 2)) for side in shape]
        label[tuple(slice(start, start + side // 3) for start, side in zip(corner, shape, strict=True))] = number
    return (rng.normal(0, 0.3, shape) + 2 * label).astype(np.float32), label


def write_subject(folder: Path, shape: tuple[int, ...] = (16, 16, 16), seed: int = 0, classes: int = 2) -> Path:
    image, label = a_volume(shape, seed, classes)
    write_nifti(folder / "img.nii.gz", image)
    write_nifti(folder / "label.nii.gz", label)
    return folder


def write_folder(root: Path, train: int = 4, valid: int = 2, shape: tuple[int, ...] = (16, 16, 16)) -> Path:
    for part, number, first in (("train", train, 0), ("valid", valid, 100)):
        for index in range(number):
            write_subject(root / part / f"{part}-{index}", shape, first + index)
    return root


def write_msd(root: Path, subjects: int = 5, shape: tuple[int, ...] = (16, 16, 16), channels: int = 2) -> Path:
    listed = []
    for index in range(subjects):
        image, label = a_volume(shape, index, classes=3)
        name = f"case_{index:03d}.nii.gz"
        write_nifti(root / "imagesTr" / name, np.stack([image] * channels, axis=-1) if channels > 1 else image)
        write_nifti(root / "labelsTr" / name, label)
        listed.append({"image": f"./imagesTr/{name}", "label": f"./labelsTr/{name}"})
    modality = {str(channel): f"scan {channel}" for channel in range(channels)}
    labels = {"0": "background", "1": "left ventricle", "2": "tumour"}
    content = {
        "name": "fake",
        "modality": modality,
        "labels": labels,
        "training": listed,
        "test": ["./imagesTs/x.nii.gz"],
    }
    (root / "dataset.json").write_text(json.dumps(content))
    return root


TINY = """
task: segmentation
data: {size: [16, 16, 16]}
model: {args: {init_filters: 8, blocks_down: [1, 1], blocks_up: [1]}}
training: {monitor: dice, monitor_mode: max}
"""


def task_of(*overrides: str) -> SegmentationTask:
    return SegmentationTask(config_of(TINY, list(overrides)))


def folder_task(root: Path, *overrides: str) -> SegmentationTask:
    return task_of("data.source=folder", f"data.root={root}", *overrides)


def msd_task(root: Path, *overrides: str) -> SegmentationTask:
    return task_of("data.source=msd", f"data.root={root}", *overrides)
