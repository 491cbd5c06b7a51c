"""The metrics of models whose answer is known, the pictures, and the file that is exported."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.config.load import load_task_class
from shardwise.data.cache import cache_folder
from shardwise.errors import MissingExtra
from shardwise.tasks.base import Loss, Rows
from shardwise.tasks.segmentation.overlays import telling_slice
from shardwise.tasks.segmentation.task import SegmentationTask
from tests.segmentation_task.files import (
    folder_task,
    msd_task,
    task_of,
    write_folder,
    write_msd,
    write_nifti,
    write_subject,
)


class Knowing(nn.Module):
    """Finds the classes by their brightness, as only somebody can who has made the volumes."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.classes = classes

    def forward(self, image: Tensor) -> Tensor:
        brightness = image[:, :1]
        if self.classes == 2:
            return 10 * (brightness - 1)
        return torch.cat([-10 * (brightness - 2 * number).abs() for number in range(self.classes)], dim=1)


class Blind(nn.Module):
    """Finds nothing anywhere."""

    def forward(self, image: Tensor) -> Tensor:
        return torch.full_like(image[:, :1], -10.0)


def valid_batch(task: SegmentationTask) -> dict[str, Any]:
    data = task.valid_data()
    return task.collate([data[index] for index in range(len(data))])


def averages(results: dict[str, Any]) -> dict[str, float]:
    return {name: float(each.sum) / float(each.count) for name, each in results.items()
            if isinstance(each, Loss) and each.count}  # fmt: skip


def rows_of(results: dict[str, Any]) -> Rows:
    rows = results["overlays"]
    assert isinstance(rows, Rows)
    return rows


MODES = [[], ["data.spatial_mode=patches", "data.size=[8, 8, 8]", "training.batch_size=2"]]


@pytest.mark.parametrize("mode", MODES, ids=["resize", "patches"])
def test_a_model_that_knows_scores_one_and_one_that_finds_nothing_scores_zero(tmp_path: Path, mode: list[str]) -> None:
    task = folder_task(write_folder(tmp_path), "data.normalize=none", *mode)
    batch = valid_batch(task)
    knows, blind = (averages(task.evaluate(model, batch)) for model in (Knowing(2), Blind()))
    assert knows["dice_foreground"] > 0.99 and blind["dice_foreground"] == 0
    assert knows["loss"] < 0.1 < 1 < blind["loss"]
    assert task.derived_metrics(knows) == {"dice": knows["dice_foreground"]}


def test_each_class_of_a_decathlon_task_has_its_dice(tmp_path: Path) -> None:
    task = msd_task(write_msd(tmp_path), "data.normalize=none")
    metrics = averages(task.evaluate(Knowing(3), valid_batch(task)))
    assert metrics["dice_left_ventricle"] > 0.9 and metrics["dice_tumour"] > 0.9
    mean = (metrics["dice_left_ventricle"] + metrics["dice_tumour"]) / 2
    assert task.derived_metrics(metrics)["dice"] == pytest.approx(mean)


def test_a_class_that_is_nowhere_is_left_out_of_the_mean() -> None:
    task = task_of("data.classes=[background, a, b]")
    assert task.derived_metrics({"loss": 1.0, "dice_a": 0.5}) == {"dice": 0.5}
    assert math.isnan(task.derived_metrics({"loss": 1.0})["dice"])


def test_volumes_of_different_size_are_validated_whole(tmp_path: Path) -> None:
    for index, shape in enumerate([(16, 16, 16), (20, 12, 9), (6, 30, 16)]):
        write_subject(tmp_path / "valid" / f"v{index}", shape, seed=index)
    write_subject(tmp_path / "train" / "t", (16, 16, 16))
    task = folder_task(tmp_path, "data.normalize=none", *MODES[1], "training.batch_size=3")
    results = task.evaluate(Knowing(2), valid_batch(task))
    assert averages(results)["dice_foreground"] > 0.99
    assert results["dice_foreground"].count == 3  # type: ignore[union-attr]
    rows = rows_of(results)
    assert rows.columns["image"].shape == (3, 20, 30)
    assert rows.columns["place"][:, :2].tolist() == [[16, 16], [20, 12], [6, 30]]


# ---------------------------------------------------------------- pictures


def test_the_slice_with_most_foreground_is_shown(tmp_path: Path) -> None:
    label = torch.zeros(16, 16, 16, dtype=torch.uint8)
    label[4:8, 4:8, 3] = 1
    label[4:12, 4:12, 11] = 1
    for part in ("train", "valid"):
        write_nifti(tmp_path / part / part / "img.nii.gz", (2 * label).float().numpy())
        write_nifti(tmp_path / part / part / "label.nii.gz", label.numpy())
    task = folder_task(tmp_path, "data.normalize=none")
    rows = rows_of(task.evaluate(Knowing(2), valid_batch(task)))
    assert rows.columns["place"].tolist() == [[16, 16, 11, 16]]
    assert torch.equal(rows.columns["truth"][0], label[:, :, 11])


def test_a_slice_with_more_classes_goes_before_one_with_more_foreground() -> None:
    mask = torch.zeros(8, 8, 6, dtype=torch.uint8)
    mask[:, :, 1] = 1  # all of one class
    mask[:2, :2, 3], mask[4:6, :2, 3] = 1, 3
    mask[:2, :2, 4], mask[4:6, :3, 4] = 1, 3  # the same classes, more of them
    mask[0, 0, 5] = 2
    assert telling_slice(mask) == 4
    mask[7, 7, 5], mask[7, 6, 5] = 1, 3
    assert telling_slice(mask) == 5, "three classes, however small"


def test_without_any_foreground_the_middle_is_shown() -> None:
    assert telling_slice(torch.zeros(4, 4, 7, dtype=torch.uint8)) == 3


def test_only_the_first_subjects_are_shown(tmp_path: Path) -> None:
    task = folder_task(write_folder(tmp_path, train=1, valid=6), "data.normalize=none")
    data = task.valid_data()
    assert rows_of(task.evaluate(Knowing(2), valid_batch(task))).keys.tolist() == [0, 1, 2, 3]
    assert "overlays" not in task.evaluate(Knowing(2), task.collate([data[4], data[5]]))


def test_the_pictures_show_truth_and_prediction_the_right_way_up(tmp_path: Path) -> None:
    """A lesion at the patient's right and front is drawn at the left and the top."""
    from matplotlib.image import imread

    label = torch.zeros(16, 16, 16, dtype=torch.uint8)
    label[11:15, 11:15, 5:9] = 1  # large x is right, large y is front
    for part in ("train", "valid"):
        write_nifti(tmp_path / "data" / part / part / "img.nii.gz", (2 * label).float().numpy())
        write_nifti(tmp_path / "data" / part / part / "label.nii.gz", label.numpy())
    task = folder_task(tmp_path / "data", "data.normalize=none")
    rows = rows_of(task.evaluate(Knowing(2), valid_batch(task)))
    assert task.study({"overlays": rows}, tmp_path / "pictures", 7) == {}
    (file,) = (tmp_path / "pictures").iterdir()
    assert file.name == "step-00000007-overlays.png"
    picture = imread(file)
    red = (picture[..., 0] > 1.3 * picture[..., 1]) & (picture[..., 0] > 1.3 * picture[..., 2])
    third = picture.shape[1] // 3
    assert not red[: -picture.shape[0] // 5, :third].any(), "the image is shown without colour"
    for column in (1, 2):
        rows_, columns = red[: -picture.shape[0] // 5, column * third : (column + 1) * third].nonzero()
        assert len(rows_) and columns.mean() < 0.4 * third and rows_.mean() < 0.45 * picture.shape[0]


def test_a_step_that_is_evaluated_again_replaces_its_picture(tmp_path: Path) -> None:
    task = folder_task(write_folder(tmp_path / "data"), "data.normalize=none")
    found, nothing = (rows_of(task.evaluate(model, valid_batch(task))) for model in (Knowing(2), Blind()))
    task.study({"overlays": found}, tmp_path / "pictures", 0)
    (file,) = (tmp_path / "pictures").iterdir()
    before = file.read_bytes()
    task.study({"overlays": nothing}, tmp_path / "pictures", 0)
    assert list((tmp_path / "pictures").iterdir()) == [file] and file.read_bytes() != before


# ---------------------------------------------------------------- the synthetic volumes, the batches, the extra


def test_synthetic_volumes_are_nifti_files_that_are_made_once() -> None:
    task = task_of("data.num_subjects=4", "data.classes=3", "data.volume_size=[20, 20, 16]")
    task.prepare_data()
    files = sorted((cache_folder() / "synthetic").rglob("*.nii.gz"))
    assert len(files) == 8
    times = [file.stat().st_mtime_ns for file in files]
    task_of("data.num_subjects=4", "data.classes=3", "data.volume_size=[20, 20, 16]").prepare_data()
    assert [file.stat().st_mtime_ns for file in files] == times
    assert {int(value) for each in range(3) for value in task.train_data()[each][0]["mask"].unique()} == {0, 1, 2}
    other = task_of("data.num_subjects=4", "data.classes=3", "data.volume_size=[20, 20, 16]", "seed=1")
    other.prepare_data()
    assert len(list((cache_folder() / "synthetic").iterdir())) == 2


def test_a_batch_has_image_and_mask_and_counts_its_patches() -> None:
    task = task_of("data.num_subjects=4", "data.spatial_mode=patches", "data.patches_per_volume=3")
    task.prepare_data()
    data = task.train_data()
    batch = task.collate([data[0], data[1]])
    assert batch["image"].shape == batch["mask"].shape == (6, 1, 16, 16, 16)
    assert type(batch["image"]) is Tensor and batch["mask"].dtype == torch.uint8
    loss = task.loss(task.build_model(), batch)
    assert task.count(batch) == loss.count == 6 and loss.sum.ndim == 0


@pytest.mark.parametrize("package", ["monai", "nibabel", "einops", "matplotlib"])
def test_a_missing_package_is_one_line_that_says_what_to_install(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "shardwise.tasks.segmentation.task")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra) as caught:
        load_task_class("segmentation")
    assert str(caught.value) == f"task: segmentation needs the package '{package}': pip install 'shardwise[medical]'"
