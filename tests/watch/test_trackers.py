"""Trackers: found by name, kept from ending a run, and added by one file and one line, as CONTRIBUTING.md says."""

from __future__ import annotations

import csv
import logging
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from shardwise.config import Config, parse_config
from shardwise.config.registry import BUILT_IN
from shardwise.errors import ConfigError, MissingExtra
from shardwise.watch.trackers import open_trackers, require_trackers
from tests.conftest import REPOSITORY


class Fails:
    """Counts what it is asked for; `log` fails at step 2, `close` always."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.logged: list[int] = []
        self.closed = 0
        Fails.last = self

    last: Fails

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.logged.append(step)
        if step == 2:
            raise ConnectionError("the other side\nis gone")

    def close(self) -> None:
        self.closed += 1
        raise OSError("no space left")


def with_tracker(monkeypatch: pytest.MonkeyPatch, where: str) -> Config:
    monkeypatch.setitem(BUILT_IN["shardwise.trackers"], "mine", where)
    return parse_config("task: chess\ntraining: {logger: mine}")


def test_a_tracker_that_fails_is_told_once_and_gets_nothing_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tracker,) = open_trackers(with_tracker(monkeypatch, f"{__name__}:Fails"), tmp_path)
    with caplog.at_level(logging.WARNING, "shardwise"):
        for step in (1, 2, 3):
            tracker.log(step, {"loss": 1.0})
        tracker.close()
    assert Fails.last.logged == [1, 2] and Fails.last.closed == 1
    assert caplog.messages == [
        "tracker mine failed at step 2 and gets nothing more: ConnectionError: the other side is gone. "
        "metrics.jsonl has every number"
    ]


def test_a_tracker_that_cannot_be_closed_is_told_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tracker,) = open_trackers(with_tracker(monkeypatch, f"{__name__}:Fails"), tmp_path)
    with caplog.at_level(logging.WARNING, "shardwise"):
        tracker.close()
    assert caplog.messages == [
        "tracker mine could not be closed: OSError: no space left. metrics.jsonl has every number"
    ]


def test_what_is_no_tracker_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError) as caught:
        require_trackers(with_tracker(monkeypatch, f"{__name__}:NOT_A_TRACKER"))
    assert str(caught.value) == (
        f"training.logger: mine stands for {__name__}:NOT_A_TRACKER, which cannot be called to make a tracker"
    )


NOT_A_TRACKER = 5


def test_mlflow_is_asked_for_by_its_package_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)  # as where it is not installed
    monkeypatch.delitem(sys.modules, "shardwise.watch.trackers.mlflow", raising=False)
    with pytest.raises(MissingExtra) as caught:
        require_trackers(parse_config("task: chess\ntraining: {logger: [mlflow]}"))
    assert str(caught.value) == "training.logger: mlflow needs the package 'mlflow': pip install mlflow"


def test_none_is_no_tracker(tmp_path: Path) -> None:
    for logger in ("none", "[none]", "[]"):
        assert open_trackers(parse_config(f"task: chess\ntraining: {{logger: {logger}}}"), tmp_path) == []


def test_a_tracker_is_added_by_the_file_and_the_line_that_contributing_shows(tmp_path: Path) -> None:
    """In a copy of the sources, changed as the page says and in no other way."""
    page = (REPOSITORY / "CONTRIBUTING.md").read_text()
    section = page.partition("## How to add a tracker\n")[2].partition("\n## ")[0]
    fences = re.findall(r"^```python title=(\S+)\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    (new_file, code), (registry, line) = fences
    shutil.copytree(REPOSITORY / "src", tmp_path / "src")
    assert not (tmp_path / new_file).exists()
    (tmp_path / new_file).write_text(code)
    before = (tmp_path / registry).read_text()
    first = '    "shardwise.trackers": {\n'
    assert before.count(first) == 1 and line.count("\n") == 1
    (tmp_path / registry).write_text(before.replace(first, first + line))
    program = (
        "from pathlib import Path; from shardwise.config import parse_config\n"
        "from shardwise.watch.trackers import open_trackers, require_trackers\n"
        "config = parse_config('task: chess\\ntraining: {logger: csv}'); require_trackers(config)\n"
        "(tracker,) = open_trackers(config, Path()); tracker.log(3, {'loss': 0.5, 'lr': 0.1}); tracker.close()"
    )
    command = [sys.executable, "-c", program]
    environment = {"PYTHONPATH": str(tmp_path / "src")}
    subprocess.run(command, cwd=tmp_path, env=environment, timeout=60, check=True)
    with (tmp_path / "metrics.csv").open() as file:
        assert list(csv.reader(file)) == [["3", "loss", "0.5"], ["3", "lr", "0.1"]]
