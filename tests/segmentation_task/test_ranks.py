"""The numbers of one process on any number of ranks, and sliding windows that do not leave a rank waiting."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest

from shardwise.config import load_config
from tests.conftest import REPOSITORY
from tests.distributed import work
from tests.distributed.pool import RankFailure, RankPool
from tests.distributed.test_parity import assert_same_curve
from tests.segmentation_task.files import write_folder, write_msd, write_subject

# Five subjects in global batches of 4: a whole one and a tail of 1, for which one rank has nothing.
CONFIG = """
task: segmentation
data: {source: folder, size: [16, 16, 16]}
model: {args: {init_filters: 8, blocks_down: [1, 1], blocks_up: [1]}}
training:
  max_epochs: 2
  gradient_clip: 0.5
  optimizer: {name: sgd, lr: 0.1}
  monitor: dice
  monitor_mode: max
"""
PATCHES = ["data.spatial_mode=patches", "data.patches_per_volume=2"]


def train(text: str, overrides: list[str], cache: str) -> dict[str, Any]:
    os.environ["SHARDWISE_CACHE"] = cache
    return work.train(text, overrides, evaluate=True)


@pytest.fixture
def run(ranks: RankPool, tmp_path: Path) -> Any:
    """What each of so many ranks reports of a training on volumes of very different size."""
    root = tmp_path / "data"
    for index, side in enumerate((16, 24, 20, 16, 30)):
        write_subject(root / "train" / f"t{index}", (side, 16, 18), seed=index)
    for index, side in enumerate((16, 44, 16)):
        write_subject(root / "valid" / f"v{index}", (side, 24, 16), seed=50 + index)

    def run(size: int, *overrides: str) -> list[dict[str, Any]]:
        common = [f"data.root={root}", f"run_dir={tmp_path}/run-{size}-{len(overrides)}", *overrides]
        return ranks.run(size, train, CONFIG, common, str(tmp_path / "cache"))

    return run


@pytest.mark.parametrize("mode", [[], PATCHES], ids=["resize", "patches"])
def test_two_ranks_give_the_numbers_of_one(run: Any, mode: list[str]) -> None:
    """Under fsdp too, where each call of the model is a collective: the ranks' volumes need 1 and 3 of them."""
    (one,) = run(1, *mode, "training.batch_size=4")
    assert one["metrics"].keys() == {"loss", "dice_foreground", "dice"}
    for strategy in ("ddp", "fsdp"):
        for rank in run(
            2, *mode, "training.batch_size=1", "training.gradient_accumulation=2", f"training.strategy={strategy}"
        ):
            assert_same_curve(rank, one)
            assert rank["metrics"] == pytest.approx(one["metrics"], rel=1e-5)


def test_a_bad_file_ends_every_rank_with_the_message_and_leaves_no_run(ranks: RankPool, tmp_path: Path) -> None:
    root = write_folder(tmp_path / "data", train=2, valid=1)
    broken = root / "train" / "train-1" / "img.nii.gz"
    broken.write_bytes(broken.read_bytes()[:100])
    with pytest.raises(RankFailure) as caught:
        ranks.run(2, work.run_fit, CONFIG, [f"data.root={root}", "name=bad"], str(tmp_path))
    assert str(caught.value).count(f"DataError: {broken} is damaged or no NIfTI file") == 2
    assert not (tmp_path / "runs" / "bad").exists()


def fit_file(name: str, overrides: list[str], folder: str, cache: str) -> dict[str, Any]:
    os.environ["SHARDWISE_CACHE"] = cache
    return work.run_fit((REPOSITORY / "configs" / name).read_text(), overrides, folder)


def test_the_decathlon_config_trains_scaled_down(ranks: RankPool, tmp_path: Path) -> None:
    """SwinUNETR in patches under fsdp on two ranks, from a folder as the Decathlon's are. In fp32: patches this small end
    in 2×1×1 voxels, for which the CPU's bf16 convolution gives weight gradients from memory it never wrote (torch 2.13)."""
    write_msd(tmp_path / "data" / "Task06_Lung", subjects=4, shape=(40, 30, 32), channels=1)
    file = "segmentation-msd.yaml"
    assert load_config(REPOSITORY / "configs" / file).model.model_dump()["args"]["feature_size"] == 48
    small = ["data.size=[64, 32, 32]", "data.spacing=[1, 1, 1]", "data.num_workers=0", "training.max_steps=2",
             "training.eval_every_n_steps=2", "data.patches_per_volume=1", "training.precision=32-true",
             "training.logger=none", "data.intensity_window=[0, 4]", "name=msd", "data.valid_fraction=0.5",
             "model.args={feature_size: 12, use_checkpoint: true, depths: [1, 1, 1, 1]}"]  # fmt: skip
    outcome = ranks.run(2, fit_file, file, small, str(tmp_path), str(tmp_path / "cache"))[0]
    assert outcome["steps"] == 2
    assert outcome["after"].keys() == {"loss", "dice_left_ventricle", "dice_tumour", "dice"}
    assert outcome["after"]["loss"] < outcome["before"]["loss"]
    assert "volumes are smaller than data.size [64, 32, 32], and are padded with zeros" in outcome["output"]
    pictures = sorted(file.name for file in (tmp_path / "runs" / "msd" / "pictures").iterdir())
    assert pictures == [f"step-0000000{step}-overlays.png" for step in (0, 2)]


def test_the_pictures_of_two_ranks_are_drawn_once_in_the_order_of_the_subjects(ranks: RankPool, tmp_path: Path) -> None:
    root = write_folder(tmp_path / "data", train=2, valid=3)
    job = functools.partial(_drawn, f"data.root={root}", f"run_dir={tmp_path}/run", str(tmp_path / "cache"))
    first, second = ranks.run(2, job)
    assert first == [[0, 1, 2]] and second == []


def _drawn(root: str, run_dir: str, cache: str) -> list[list[int]]:
    from shardwise.tasks.segmentation.task import SegmentationTask

    drawn: list[list[int]] = []
    original = SegmentationTask.study

    def study(self: Any, rows: Any, pictures: Path, step: int) -> Any:
        drawn.append(rows["overlays"].keys.tolist())
        return original(self, rows, pictures, step)

    SegmentationTask.study = study  # type: ignore[method-assign]
    try:
        train(CONFIG, [root, run_dir, "training.max_steps=1", "training.batch_size=1", "training.strategy=ddp"], cache)
    finally:
        SegmentationTask.study = original  # type: ignore[method-assign]
    return drawn
