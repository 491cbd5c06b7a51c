"""Strategies are files, or come from other packages: nothing else in the code is told of them."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from shardwise.config import parse_config
from shardwise.config.registry import BUILT_IN
from shardwise.engine.session import Session
from shardwise.errors import ConfigError
from shardwise.parallel import Strategy, strategy_class
from tests.cli.program import run_program
from tests.conftest import REPOSITORY

PLUGIN = REPOSITORY / "tests" / "fixtures" / "plugin"
SOURCE = REPOSITORY / "src" / "shardwise"


@pytest.mark.parametrize("name", BUILT_IN["shardwise.strategies"])
def test_every_file_holds_the_strategy_of_its_name(name: str) -> None:
    found = strategy_class(name)
    assert issubclass(found, Strategy) and found.name == name


def test_a_strategy_is_added_by_the_file_that_contributing_shows(tmp_path: Path) -> None:
    """In a copy of the sources, changed as the page says and in no other way. It learns what ddp learns."""
    page = (REPOSITORY / "CONTRIBUTING.md").read_text()
    section = page.partition("## How to add a strategy\n")[2].partition("\n## ")[0]
    ((new_file, code),) = re.findall(r"^```python title=(\S+)\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    shutil.copytree(REPOSITORY / "src", tmp_path / "src")
    assert not (tmp_path / new_file).exists()
    (tmp_path / new_file).write_text(code)
    config = "task: tests.tasks:Ragged\ntraining: {num_gpus: 2, device: cpu, batch_size: 4, max_steps: 4, log_every_n_steps: 1}\n"
    (tmp_path / "run.yaml").write_text(config)
    curves = []
    for strategy in ("plain", "ddp"):
        command = [
            sys.executable,
            "-m",
            "shardwise",
            "train",
            "run.yaml",
            "--fresh",
            "--set",
            f"training.strategy={strategy}",
        ]
        done = run_program(command, tmp_path, PYTHONPATH=f"{tmp_path / 'src'}:{REPOSITORY}")
        assert done.returncode == 0, done.stderr
        assert f"strategy {strategy}," in done.stdout
        lines = [json.loads(line) for line in (tmp_path / "runs/run/metrics.jsonl").read_text().splitlines()]
        curves.append([(line["loss"], line["grad_norm"]) for line in lines if "loss" in line])
    assert len(curves[0]) == 4
    for mine, theirs in zip(*curves, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)


def test_a_strategy_of_another_package_has_its_own_block(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(PLUGIN)
    text = (
        f"task: tests.tasks:Ragged\nrun_dir: {tmp_path}\ntraining: {{strategy: halves, batch_size: 53, max_steps: 1}}"
    )
    norms = []
    for settings in (["training.strategy=single"], [], ["training.halves.divisor=8.0"]):
        with Session(parse_config(text, settings)) as session:
            session.prepare()
            norms.append(session.step(next(session.batches())).grad_norm)
    assert norms[1:] == pytest.approx([norms[0] / 2, norms[0] / 8])
    with pytest.raises(
        ConfigError, match=r"training\.halves\.divsor is not a key .* Nearest: training\.halves\.divisor"
    ):
        parse_config(text, ["training.halves.divsor=3"])
    with pytest.raises(ConfigError, match="divisor: 1 is what strategy single does"):
        Session(parse_config(text, ["training.halves.divisor=1.0"]))


def test_an_unknown_strategy_is_answered_with_those_there_are() -> None:
    with pytest.raises(
        ConfigError, match=r"training\.strategy: 'fdsp' is not allowed\. Allowed: .*zero1.* \(nearest: fsdp\)"
    ):
        parse_config("task: chess\ntraining: {strategy: fdsp}")


NAMES = "|".join(BUILT_IN["shardwise.strategies"])
AXES = {"tensor", "pipeline"}
"""Words that are also something else: an axis of the mesh, a block of the config."""


def test_no_strategy_is_asked_for_by_name_outside_its_file() -> None:
    """Sentences may recommend one; no line compares with one."""
    asked = []
    for file in sorted(SOURCE.rglob("*.py")):
        room = file.relative_to(SOURCE).parts[:2]
        if room[0] == "config" or room == ("parallel", "strategies"):
            continue
        for number, line in enumerate(file.read_text().splitlines(), start=1):
            if re.search(rf"(strategy\w*|name)\b.*(==|!=|\bin\b)[ (\[]*[\"']({NAMES})[\"']", line):
                asked.append(f"{file.relative_to(SOURCE)}:{number}: {line.strip()}")
    assert asked == []
