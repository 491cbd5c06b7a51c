"""`shardwise train` and `shardwise export`, as a user runs them."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from shardwise.cli import main
from tests.cli.program import shardwise
from tests.conftest import REPOSITORY

SMALL = ["--set", "data.num_subjects=6", "--set", "data.volume_size=[20, 20, 16]", "--set", "data.size=[16, 16, 16]",
         "--set", "training.max_steps=3", "--set", "training.batch_size=1"]  # fmt: skip


def test_the_tiny_config_trains_and_its_weights_load_into_monais_network(tmp_path: Path) -> None:
    from monai.networks.nets import SegResNet
    from safetensors.torch import load_file

    config = str(REPOSITORY / "configs" / "segmentation-tiny.yaml")
    done = shardwise(tmp_path, "train", config, *SMALL, SHARDWISE_CACHE=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr
    assert "dice lesion" in done.stdout and "making 6 synthetic volumes in" in done.stdout
    folder = tmp_path / "runs" / "segmentation-tiny"
    assert json.loads((folder / "run.json").read_text())["world"] == 2
    assert {"step-00000000-overlays.png", "step-00000003-overlays.png"} <= {
        f.name for f in (folder / "pictures").iterdir()
    }
    assert main(["export", str(folder), "--to", str(tmp_path / "model")]) == 0
    exported = load_file(tmp_path / "model" / "model.safetensors")
    network = SegResNet(in_channels=1, out_channels=1, init_filters=8, blocks_down=(1, 1, 1), blocks_up=(1, 1))
    start = {name: value.clone() for name, value in network.state_dict().items()}
    network.load_state_dict(exported)
    assert any(not torch.equal(start[name], value) for name, value in exported.items())
