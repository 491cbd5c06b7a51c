"""The shipped configs, trained and exported by the program as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardwise.cli import main
from shardwise.config import load_config
from shardwise.data.cache import cache_folder
from tests.cli.program import environment, shardwise
from tests.conftest import REPOSITORY
from tests.distributed import work
from tests.distributed.pool import RankFailure, RankPool
from tests.images_task.made import write_images, write_model


def test_the_tiny_config_trains_on_two_ranks_and_exports(tmp_path: Path) -> None:
    overrides = ["training.max_steps=3", "training.log_every_n_steps=1", "data.num_images=300"]
    settings = [word for override in overrides for word in ("--set", override)]
    done = shardwise(tmp_path, "train", str(REPOSITORY / "configs" / "images-tiny.yaml"), *settings)
    assert done.returncode == 0, done.stderr
    assert "2 × CPU, strategy ddp" in done.stdout
    assert "batch norm: each rank's statistics come from its own 32 samples" in done.stdout
    assert "done: 3 steps" in done.stdout and "images/s" in done.stdout
    run = tmp_path / "runs" / "images-tiny"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evaluated = [line["eval"] for line in lines if "eval" in line]
    assert len(evaluated) == 2 and all(metrics.keys() == {"loss", "accuracy", "top5_accuracy"} for metrics in evaluated)
    assert [line["step"] for line in lines if "eval" not in line] == [1, 2, 3]
    assert "torch.utils.flop_counter" in json.loads((run / "run.json").read_text())["mfu"]["formula"]
    assert main(["export", str(run), "--to", str(tmp_path / "model")]) == 0
    assert_loads_as_trained(tmp_path / "model", run)


def assert_loads_as_trained(exported: Path, run: Path) -> None:
    """from_pretrained gives the weights of the checkpoint, bit for bit."""
    from transformers import AutoImageProcessor, AutoModelForImageClassification

    from shardwise.checkpoint import CheckpointStore, load_model
    from shardwise.tasks.images.task import ImagesTask

    config = load_config(run / "config.yaml")
    task = ImagesTask(config)
    expected = task.build_model()
    start = {name: value.clone() for name, value in expected.state_dict().items()}
    best, _ = CheckpointStore(run / "checkpoints").best_whole(config.training.monitor_mode)
    load_model(expected, best)
    loaded = AutoModelForImageClassification.from_pretrained(exported)
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, expected.state_dict()[name]), name
    assert any(not torch.equal(start[name], value) for name, value in loaded.state_dict().items()), (
        "nothing was trained"
    )
    assert list(loaded.config.id2label.values()) == task.classes
    assert AutoImageProcessor.from_pretrained(exported).image_mean == task.look.mean


def test_the_resnet_50_config_trains_on_a_folder_of_images(ranks: RankPool, tmp_path: Path) -> None:
    text = (REPOSITORY / "configs" / "images-resnet50.yaml").read_text()
    write_images(tmp_path / "data" / "images" / "train", {"cat": 20, "dog": 20}, ".jpg", (60, 50))
    write_images(tmp_path / "data" / "images" / "valid", {"cat": 3, "dog": 3}, ".jpg", (60, 50))
    small = ["data.image_size=32", "data.num_workers=0", "training.batch_size=4", "model.widths=[8, 8, 8, 8]"]
    overrides = [*small, "training.max_steps=3"]
    for outcome in ranks.run(2, work.run_fit, text, overrides, str(tmp_path)):
        assert outcome["steps"] == 3 and outcome["after"].keys() == {"loss", "accuracy"}
    assert (tmp_path / "runs" / "test" / "checkpoints" / "step-00000003").is_dir()


def test_a_hugging_face_data_set_and_a_named_model_train_on_two_ranks(ranks: RankPool, tmp_path: Path) -> None:
    write_images(tmp_path / "set" / "train", {"cat": 9, "dog": 9})
    write_images(tmp_path / "set" / "test", {"cat": 2, "dog": 3})
    text = f"""
    task: images
    data: {{source: hub, dataset: {tmp_path / "set"}, valid_split: test}}
    model: {{name: {write_model(tmp_path / "named")}}}
    training: {{batch_size: 3}}
    """
    for rank, outcome in enumerate(ranks.run(2, _fit_with_own_cache, text, str(tmp_path))):
        assert outcome["steps"] == 3 and outcome["after"].keys() == {"loss", "accuracy"}
        assert ("they start anew, for 2 classes: classifier.1.bias" in outcome["output"]) == (rank == 0)


def _fit_with_own_cache(text: str, folder: str) -> work.Record:
    import datasets

    datasets.config.HF_DATASETS_CACHE = Path(folder) / "hub-cache"
    return work.run_fit(text, [], folder)


def test_bad_input_is_one_message_and_leaves_nothing_behind(ranks: RankPool, tmp_path: Path) -> None:
    write_images(tmp_path / "images" / "train", {"cat": 4, "dog": 4})
    (tmp_path / "images" / "train" / "dog" / "1.png").write_bytes(b"nothing")
    text = "task: images\ndata: {source: folder, root: images, image_size: 32}"
    before = sorted(cache_folder().rglob("*"))
    with pytest.raises(RankFailure) as caught:
        ranks.run(2, work.run_fit, text, [], str(tmp_path))
    told = "images/train/dog/1.png cannot be read as an image: not a kind of image that Pillow knows"
    assert str(caught.value).count(told) >= 2, "every rank is told"
    assert not (tmp_path / "runs" / "test").exists()
    new = set(cache_folder().rglob("*")) - set(before)
    assert not [file for file in new if file.name.startswith(".")]


def test_a_config_of_images_is_read_without_torch() -> None:
    program = "import sys; from shardwise import load_config; load_config(sys.argv[1]); print('torch' in sys.modules)"
    command = [sys.executable, "-c", program, str(REPOSITORY / "configs" / "images-resnet50.yaml")]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"
