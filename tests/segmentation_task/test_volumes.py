"""From files to tensors: masks keep their classes, the fixed part is done once, the random part follows from the seed."""

from __future__ import annotations

import functools
import gzip
import importlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardwise.config import Batching, DataBlock
from shardwise.data import GlobalOrder, Reader, StepLoader, cache
from shardwise.data.cache import cache_folder
from shardwise.errors import DataError
from shardwise.tasks.segmentation import facts, transforms, volumes
from shardwise.tasks.segmentation.facts import facts_of
from shardwise.tasks.segmentation.task import SegmentationTask
from shardwise.tasks.segmentation.transforms import shape_after
from tests.distributed.pool import RankPool
from tests.segmentation_task.files import folder_task, write_folder, write_nifti, write_subject
from tests.tasks import config_of

OBLIQUE = [[0, -1.5, 0, 10], [2.0, 0, 0, -5], [0, 0, -3.0, 7], [0, 0, 0, 1]]


def write_classes_apart(folder: Path, affine: Any = None) -> None:
    """Classes 1 and 3 side by side: an average of the two is 2, which does not occur."""
    label = np.zeros((17, 15, 13), np.uint8)
    label[3:9, 3:12, 2:11], label[9:14, 3:12, 2:11] = 1, 3
    write_nifti(folder / "img.nii.gz", label.astype(np.float32), affine)
    write_nifti(folder / "label.nii.gz", label, affine)


@pytest.mark.parametrize(
    "settings", [["data.size=[24, 24, 20]"], ["data.size=[8, 16, 8]"], ["data.spacing=[0.7, 1.1, 1.3]"]]
)
def test_a_resampled_mask_has_no_values_but_its_classes(tmp_path: Path, settings: list[str]) -> None:
    for part in ("train", "valid"):
        write_classes_apart(tmp_path / part / part)
    task = folder_task(tmp_path, "data.classes=4", "data.normalize=none", *settings)
    volume = task.valid_data()[0]
    assert volume["mask"].shape[1:] == volume["image"].shape[1:]
    assert volume["mask"].unique().tolist() == [0, 1, 3]
    assert 2 in volume["image"].round().unique().tolist(), "the same voxels averaged, as an image is, do have a 2"


def test_a_resized_mask_lies_where_its_image_lies(tmp_path: Path) -> None:
    """PyTorch's plain nearest takes the voxel before, and would put the mask half a voxel beside the image."""
    for part in ("train", "valid"):
        write_classes_apart(tmp_path / part / part)
    task = folder_task(tmp_path, "data.classes=4", "data.normalize=none", "data.size=[12, 11, 9]")
    volume = task.valid_data()[0]
    image, mask = ((volume[key][0] > 0.5).nonzero().float().mean(dim=0) for key in ("image", "mask"))
    assert torch.allclose(image, mask, atol=0.15)


def test_volumes_are_turned_to_the_same_orientation(tmp_path: Path) -> None:
    """The same body, written with other axes first and in other directions, gives the same tensors."""
    label = np.zeros((10, 12, 8), np.uint8)
    label[1:4, 2:5, 1:3] = 1
    turned = label[::-1, :, ::-1].transpose(2, 0, 1)
    affine = np.zeros((4, 4))
    affine[2, 0], affine[0, 1], affine[1, 2], affine[3, 3] = -1, -1, 1, 1
    for part, voxels, where in (("train", label, np.eye(4)), ("valid", turned, affine)):
        write_nifti(tmp_path / part / part / "img.nii.gz", voxels.astype(np.float32), where)
        write_nifti(tmp_path / part / part / "label.nii.gz", voxels, where)
    task = folder_task(tmp_path, "data.spatial_mode=patches")
    straight, back = task.train_data().volumes[0], task.valid_data()[0]
    assert torch.equal(straight["mask"], back["mask"]) and torch.equal(straight["image"], back["image"])


def test_the_window_becomes_zero_to_one_and_zscore_mean_zero(tmp_path: Path) -> None:
    write_folder(tmp_path, train=1, valid=1)
    windowed = folder_task(tmp_path, "data.intensity_window=[0, 1]").valid_data()[0]["image"]
    assert float(windowed.min()) == 0 and float(windowed.max()) == 1
    scored = folder_task(tmp_path).valid_data()[0]["image"]
    assert abs(float(scored.mean())) < 1e-5 and abs(float(scored.std()) - 1) < 1e-3
    raw = folder_task(tmp_path, "data.normalize=none").valid_data()[0]["image"]
    assert float(raw.max()) > 1.5


@pytest.mark.parametrize("spacing", [None, "[1.0, 1.0, 2.0]", "[0.8, 2.5, 1.7]"])
def test_the_shape_is_known_from_the_header(tmp_path: Path, spacing: str | None) -> None:
    for part in ("train", "valid"):
        write_classes_apart(tmp_path / part / part, OBLIQUE)
    settings = ["data.spatial_mode=patches", "data.classes=4", *([f"data.spacing={spacing}"] if spacing else [])]
    task = folder_task(tmp_path, *settings)
    grid = facts_of(task.subjects.valid[0]).image
    assert shape_after(grid, task.data) == tuple(task.valid_data()[0]["image"].shape[1:])


# ---------------------------------------------------------------- the cache


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The subjects that went through the fixed transforms, in this process."""
    read: list[str] = []
    original = volumes.Volumes._transformed

    def counted(self: Any, subject: Any) -> Any:
        read.append(subject.name)
        return original(self, subject)

    monkeypatch.setattr(volumes.Volumes, "_transformed", counted)
    return read


def test_fixed_transforms_run_once_for_all_epochs_and_runs(tmp_path: Path, reads: list[str]) -> None:
    write_folder(tmp_path, train=3, valid=1)
    data = folder_task(tmp_path).train_data()
    for _ in range(3):
        for index in range(3):
            data[index]
    assert reads == ["train-0", "train-1", "train-2"]
    folder_task(tmp_path, "data.flips=0", "seed=5").train_data()[0]
    assert len(reads) == 3, "another run, with other random transforms"
    without = folder_task(tmp_path, "data.cache=false").train_data()
    without[0], without[0]
    assert len(reads) == 5


@pytest.mark.parametrize(
    "setting", ["data.size=[8, 16, 16]", "data.spacing=[2, 2, 2]", "data.intensity_window=[0, 2]", "data.normalize=none",
                "data.spatial_mode=patches"]
)  # fmt: skip
def test_other_settings_are_another_entry(tmp_path: Path, reads: list[str], setting: str) -> None:
    write_folder(tmp_path, train=1, valid=1)
    folder_task(tmp_path).valid_data()[0]
    folder_task(tmp_path, setting).valid_data()[0]
    assert len(reads) == 2


@pytest.mark.parametrize("file", ["img.nii.gz", "label.nii.gz"])
def test_a_changed_file_is_another_entry(tmp_path: Path, reads: list[str], file: str) -> None:
    write_folder(tmp_path, train=1, valid=1)
    before = folder_task(tmp_path).valid_data()[0]
    other = write_subject(tmp_path / "other", seed=77)
    (other / file).rename(tmp_path / "valid" / "valid-0" / file)
    after = folder_task(tmp_path).valid_data()[0]
    key = "image" if file == "img.nii.gz" else "mask"
    assert len(reads) == 2 and not torch.equal(before[key], after[key])


@pytest.mark.parametrize("ending", [".nii.gz", ".nii"])
def test_a_file_changed_in_place_with_the_size_and_the_time_it_had_is_another_entry(
    tmp_path: Path, reads: list[str], ending: str
) -> None:
    """As copying tools leave it that keep times. One voxel is another; packed without compression, no byte more."""
    write_folder(tmp_path, train=1, valid=1)
    folder = tmp_path / "valid" / "valid-0"
    file = folder / f"label{ending}"
    content = gzip.decompress((folder / "label.nii.gz").read_bytes())
    (folder / "label.nii.gz").unlink()
    pack = functools.partial(gzip.compress, compresslevel=0) if ending == ".nii.gz" else bytes
    file.write_bytes(pack(content))
    task = folder_task(tmp_path)
    task.prepare_data()
    before, about = task.valid_data()[0]["mask"].clone(), file.stat()
    with file.open("r+b") as stream:
        stream.write(pack(content[:-1] + bytes([1 - content[-1]])))
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (about.st_size, about.st_mtime_ns)
    after = task.valid_data()[0]["mask"]
    assert reads == ["valid-0"] * 2 and int((before != after).sum()) == 1
    again = folder_task(tmp_path)
    again.prepare_data()
    assert torch.equal(again.valid_data()[0]["mask"], after)


@pytest.mark.parametrize(
    "package", ["shardwise", "monai", "nibabel", "torch", "numpy"], ids=lambda package: f"another {package}"
)
def test_what_another_version_made_is_made_again(
    tmp_path: Path, reads: list[str], package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path, train=1, valid=1)
    task = folder_task(tmp_path)
    task.valid_data()[0]
    where = cache if package == "shardwise" else importlib.import_module(package)
    monkeypatch.setattr(where, "__version__", "0.0.1")
    task.valid_data()[0]
    assert len(reads) == 2
    monkeypatch.undo()


def test_what_other_code_made_is_made_again(tmp_path: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two releases the version is the same."""
    write_folder(tmp_path, train=1, valid=1)
    task = folder_task(tmp_path)
    task.valid_data()[0]
    changed = tmp_path / "transforms.py"
    changed.write_text(Path(transforms.__file__).read_text() + "\n# another order\n")
    monkeypatch.setattr(transforms, "__file__", str(changed))
    task.valid_data()[0]
    assert len(reads) == 2


def test_the_version_that_made_the_known_facts_counts_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path, train=1, valid=1)
    folder_task(tmp_path).prepare_data()
    read: list[str] = []
    original = facts.inspect_files
    monkeypatch.setattr(facts, "inspect_files", lambda subject: (read.append(subject.name), original(subject))[1])
    folder_task(tmp_path).prepare_data()
    assert read == []
    monkeypatch.setattr(cache, "__version__", "0.0.1")
    folder_task(tmp_path).prepare_data()
    assert sorted(read) == ["train-0", "valid-0"]


@pytest.mark.parametrize("cache", ["true", "false"])
def test_a_file_that_changes_after_the_check_is_checked_again(tmp_path: Path, cache: str) -> None:
    write_folder(tmp_path, train=1, valid=1)
    task = folder_task(tmp_path, f"data.cache={cache}")
    task.prepare_data()
    data = task.train_data()
    data[0]
    file = write_nifti(tmp_path / "train" / "train-0" / "label.nii.gz", np.full((16, 16, 16), 7, np.uint8))
    with pytest.raises(DataError) as caught:
        data[0]
    assert str(caught.value).startswith(f"{file} has the value(s) 7, but there are 2 classes")


def test_an_entry_that_is_damaged_is_made_again(tmp_path: Path, reads: list[str]) -> None:
    write_folder(tmp_path, train=1, valid=1)
    before = folder_task(tmp_path).valid_data()[0]["image"].clone()
    (entry,) = (cache_folder() / "segmentation").glob("*.pt")
    entry.write_bytes(entry.read_bytes()[:1000])
    assert torch.equal(folder_task(tmp_path).valid_data()[0]["image"], before)
    assert len(reads) == 2 and [file for file in (cache_folder() / "segmentation").iterdir() if file.is_file()] == [
        entry
    ]


def test_a_volume_that_cannot_be_transformed_leaves_nothing_behind(tmp_path: Path) -> None:
    write_folder(tmp_path, train=1, valid=1)
    image = tmp_path / "valid" / "valid-0" / "img.nii.gz"
    image.write_bytes(b"no volume")  # after it was checked
    with pytest.raises(DataError) as caught:
        folder_task(tmp_path).valid_data()[0]
    assert str(caught.value).startswith(f"{image} is damaged or no NIfTI file (")
    left = [file for file in (cache_folder() / "segmentation").rglob("*") if file.is_file()]
    assert [file.suffix for file in left] == [".json"], "what is known of the subject that it looked at first"


# ---------------------------------------------------------------- what is random

CONFIG = """
task: segmentation
data: {source: folder, size: [16, 16, 16], spatial_mode: patches, patches_per_volume: 2, intensity_shift: 0.5}
"""


def samples_of(root: str, cache: str, workers: int) -> dict[tuple[int, int], Any]:
    """(epoch, subject) → its patches, as the loader of one rank with this many workers gives them."""
    os.environ["SHARDWISE_CACHE"] = cache
    task = SegmentationTask(config_of(CONFIG, [f"data.root={root}"]))
    reader = Reader(task.train_data(), task.collate, task.count, seed=3)
    options = DataBlock(num_workers=workers)
    loader = StepLoader(reader, GlobalOrder(5, 3), Batching(1, 1, 1), 0, torch.device("cpu"), options, epochs=2)
    return {
        (step.epoch, step.ids[0]): {key: value.numpy() for key, value in step.micro[0].inputs.items()}
        for step in loader
    }


def test_patches_follow_from_seed_epoch_and_subject_alone(ranks: RankPool, tmp_path: Path) -> None:
    """Here, in another process, and in its workers; and another epoch has others."""
    root, cache = write_folder(tmp_path / "data", train=5, valid=1, shape=(24, 24, 24)), str(cache_folder())
    here = samples_of(str(root), cache, workers=0)
    assert len(here) == 10
    for workers in (0, 2):
        there = ranks.run(1, samples_of, str(root), cache, workers)[0]
        for key, sample in here.items():
            assert sample["image"].shape == (2, 1, 16, 16, 16)
            assert np.array_equal(sample["image"], there[key]["image"]) and np.array_equal(
                sample["mask"], there[key]["mask"]
            )
    for subject in range(5):
        assert not np.array_equal(here[0, subject]["image"], here[1, subject]["image"])
    assert len(list((cache_folder() / "segmentation").glob("*.pt"))) == 5, "one entry for each, whoever reads"


def test_image_and_mask_are_cropped_and_flipped_together(tmp_path: Path) -> None:
    for part in ("train", "valid"):
        write_classes_apart(tmp_path / part / part)
    task = folder_task(tmp_path, "data.classes=4", "data.normalize=none", "data.intensity_shift=0", "data.size=[8, 8, 8]",
                       "data.spatial_mode=patches", "data.patches_per_volume=4")  # fmt: skip
    patches = [patch for _ in range(5) for patch in task.train_data()[0]]
    assert all(torch.equal(patch["image"], patch["mask"].float()) for patch in patches)
    assert len({tuple(patch["mask"].flatten().tolist()) for patch in patches}) > 10


def test_a_subject_without_foreground_is_cropped_too(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    write_folder(tmp_path, train=1, valid=1)
    write_nifti(tmp_path / "train" / "train-0" / "label.nii.gz", np.zeros((16, 16, 16), np.uint8))
    (patch,) = folder_task(tmp_path, "data.spatial_mode=patches", "data.size=[8, 8, 8]").train_data()[0]
    assert patch["mask"].shape == (1, 8, 8, 8) and not recwarn.list
