"""A package of somebody else adds a task and a tracker: `tests/fixtures/plugin`, as pip would have installed it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardwise.config import load_config
from shardwise.config.load import config_class, load_task_class
from shardwise.errors import ConfigError
from tests.cli.program import run_program
from tests.conftest import REPOSITORY

PLUGIN = REPOSITORY / "tests" / "fixtures" / "plugin"
CONFIG = """
task: squares
data: {number: 24}
model: {width: 4}
training: {num_gpus: 1, device: cpu, batch_size: 8, max_steps: 3, log_every_n_steps: 1, logger: [fragile, lines]}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "mine.yaml"
    file.write_text(CONFIG)
    return file


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(PLUGIN)
    yield
    for name in [name for name in sys.modules if name.startswith("shardwise_tiny")]:
        del sys.modules[name]


def test_the_program_trains_a_task_of_an_installed_package_and_feeds_its_tracker(file: Path, tmp_path: Path) -> None:
    path = f"{REPOSITORY / 'src'}:{PLUGIN}"
    done = run_program([sys.executable, "-m", "shardwise", "train", "mine.yaml"], tmp_path, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    assert "mine: squares, 13 parameters, 24 samples" in done.stdout
    run = tmp_path / "runs" / "mine"
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [f"{line['step']} {line['loss']}" for line in logged]
    assert len(steps) == 3 and (run / "lines.txt").read_text().splitlines() == [*steps, "closed"]
    # A tracker that fails is told once, and ends neither the run nor the others.
    assert (run / "fragile.txt").read_text().splitlines() == [steps[0], "closed"]
    assert [line for line in done.stdout.splitlines() if "fragile" in line] == [
        "warning: tracker fragile failed at step 2 and gets nothing more: OSError: the other side is gone. "
        "metrics.jsonl has every number"
    ]


@pytest.mark.usefixtures("installed")
def test_the_config_of_an_installed_task_is_as_strict_as_any(file: Path) -> None:
    config: Any = load_config(file)
    assert (config.data.number, config.data.num_workers, config.model.width) == (24, 0, 4)
    assert config.training.loggers == ["fragile", "lines"]
    assert load_task_class("squares").__module__ == "shardwise_tiny.squares"
    assert "SquaresData" in config_class("squares").model_json_schema()["$defs"]
    with pytest.raises(
        ConfigError, match=r"--set: data\.numbr is not a key that shardwise knows .* Nearest: data\.number"
    ):
        load_config(file, ["data.numbr=3"])


@pytest.mark.usefixtures("installed")
def test_a_misspelt_name_is_answered_with_those_of_installed_packages_too(file: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(file, ["task=sqares"])
    assert str(caught.value) == (
        f"{file}: task: 'sqares' is neither a known task (chess, cells, segmentation, images, squares) nor an import path. "
        "Nearest: squares. Your own is written as module:Class, for example mypackage.tasks:MyTask"
    )
    with pytest.raises(ConfigError) as caught:
        load_config(file, ["training.logger=line"])
    assert str(caught.value) == (
        "--set: training.logger: 'line' is not allowed. "
        "Allowed: tensorboard, wandb, mlflow, lines, fragile, none (nearest: lines), or a list"
    )


def test_without_the_package_its_names_are_unknown(file: Path) -> None:
    with pytest.raises(ConfigError, match="'squares' is neither a known task"):
        load_config(file)
    with pytest.raises(ConfigError, match=r"'lines' is not allowed\. Allowed: tensorboard, wandb, mlflow, none"):
        load_config(file, ["task=chess", "data={}", "model={}"])


@pytest.mark.parametrize(
    ("task", "logger", "imported"),
    [
        ("chess", "none", []),
        ("chess", "lines", []),  # known by its name; imported when a run begins
        ("squares", "none", ["shardwise_tiny", "shardwise_tiny.squares"]),
    ],
)
def test_what_a_config_does_not_name_is_not_imported(task: str, logger: str, imported: list[str]) -> None:
    program = (
        f"import sys; from shardwise.config import parse_config; parse_config('task: {task}', ['training.logger={logger}'])\n"
        "print([name for name in sorted(sys.modules) if name.startswith('shardwise_tiny')])"
    )
    command = [sys.executable, "-c", program]
    environment = {"PYTHONPATH": f"{REPOSITORY / 'src'}:{PLUGIN}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == str(imported)
