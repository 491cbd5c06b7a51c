"""What a member of a run says of itself."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from shardwise.parallel.membership import differences
from shardwise.parallel.what_runs import MACHINES_OWN, what_runs
from tests.tasks import config_of

TEXT = """
task: chess
data: {source: synthetic, num_games: 8}
model: {architecture: llama, hidden_dim: 16, num_layers: 1, num_heads: 1}
training: {strategy: ddp, max_steps: 1, num_gpus: 2}
"""


def test_every_key_counts_also_those_that_are_not_written_and_a_machine_s_own_may_differ() -> None:
    one, other = config_of(TEXT), config_of(TEXT, ["training.optimizer.lr=0.5", "training.num_gpus=4"])
    names = [name for name, *_ in differences(what_runs(one), what_runs(other))]
    assert names == ["training.num_gpus", "training.optimizer.lr"]
    names = [name for name, *_ in differences(what_runs(one, own=MACHINES_OWN), what_runs(other, own=MACHINES_OWN))]
    assert names == ["training.optimizer.lr"]
    assert not differences(what_runs(one, "cpu"), what_runs(config_of(TEXT), "cpu"))
    assert differences(what_runs(one, "cpu"), what_runs(one, "cuda")) == [("device", '"cpu"', '"cuda"')]


def test_sources_are_those_of_shardwise_and_of_the_user_and_versions_those_of_what_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("mine_to_train", "helper_of_mine"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "helper_of_mine.py").write_text("SIZE = 3\n")
    (tmp_path / "mine_to_train.py").write_text("import helper_of_mine\n")
    __import__("mine_to_train")
    before = what_runs(config_of(TEXT))
    assert {"the source of mine_to_train", "the source of helper_of_mine", "shardwise's own sources"} <= before[
        "sources"
    ].keys()
    modules = {name.removeprefix("the source of ").partition(".")[0] for name in before["sources"]}
    assert modules.isdisjoint({"torch", "numpy", "transformers", "json", "shardwise", "_ops", "_classes"})
    assert before["versions"]["the version of torch"] == str(torch.__version__)
    assert {"the version of Python", "the version of transformers", "the version of numpy"} <= before["versions"].keys()
    (tmp_path / "helper_of_mine.py").write_text("SIZE = 4\n")
    found = differences(before, what_runs(config_of(TEXT)))
    assert [name for name, *_ in found] == ["the source of helper_of_mine"]
    assert all(value.startswith("contents ") for _, *values in found for value in values)
