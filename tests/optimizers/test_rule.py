"""Optimizers are files: CONTRIBUTING's example is one, and nothing else in the code is told of it."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from shardwise.config import parse_config
from shardwise.config.registry import BUILT_IN
from shardwise.config.schema import Optimizer
from shardwise.errors import ConfigError
from shardwise.optimizers import update_rule
from tests.cli.program import run_program
from tests.conftest import REPOSITORY


@pytest.mark.parametrize("name", BUILT_IN["shardwise.optimizers"])
def test_every_file_holds_the_optimizer_of_its_name(name: str) -> None:
    assert update_rule(Optimizer(name=name)).name == name


def test_an_unknown_optimizer_is_answered_with_those_there_are() -> None:
    with pytest.raises(
        ConfigError, match=r"optimizer\.name: 'adamx' is not allowed\. Allowed: .*sgd.* \(nearest: adamw?\)"
    ):
        parse_config("task: chess\ntraining: {optimizer: {name: adamx}}")


def test_an_optimizer_is_added_by_the_file_that_contributing_shows(tmp_path: Path) -> None:
    """In a copy of the sources, changed as the page says and in no other way. A resumed run goes on with its state."""
    page = (REPOSITORY / "CONTRIBUTING.md").read_text()
    section = page.partition("## How to add an optimizer\n")[2].partition("\n## ")[0]
    ((new_file, code),) = re.findall(r"^```python title=(\S+)\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    shutil.copytree(REPOSITORY / "src", tmp_path / "src")
    assert not (tmp_path / new_file).exists()
    (tmp_path / new_file).write_text(code)
    (tmp_path / "run.yaml").write_text(
        "task: tests.tasks:Ragged\n"
        "training: {num_gpus: 1, device: cpu, batch_size: 8, max_epochs: 1, log_every_n_steps: 1,"
        " scheduler: {name: constant}, optimizer: {name: rmsprop, lr: 0.001, momentum: 0.5}}\n"
    )

    def curve(*options: str) -> list[float]:
        command = [sys.executable, "-m", "shardwise", "train", "run.yaml", *options]
        done = run_program(command, tmp_path, PYTHONPATH=f"{tmp_path / 'src'}:{REPOSITORY}")
        assert done.returncode == 0, done.stderr
        lines = [json.loads(line) for line in (tmp_path / "runs/run/metrics.jsonl").read_text().splitlines()]
        return [line["loss"] for line in lines if "loss" in line]

    whole = curve()
    assert len(whole) == 7 and whole[-1] < whole[0]
    assert curve("--fresh", "--set", "training.max_steps=3") == whole[:3]
    assert curve("--resume", "auto") == whole
