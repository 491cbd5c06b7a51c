"""Paths of a config: ~ and the environment's variables in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.config import Block, DataBlock, PathText, parse_config
from shardwise.errors import ConfigError


class Files(DataBlock):
    """The data block of a task of somebody's own."""

    folder: PathText = "here"


class Own:
    Data, Model = Files, Block


@pytest.mark.parametrize("written", ["$WHERE/x", "${WHERE}/x", "~/x"])
def test_every_key_that_is_a_path_has_its_variables_replaced(written: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHERE", "/of/mine")
    monkeypatch.setenv("HOME", "/of/mine")
    keys = {
        "chess": ["data.paths=['{}']", "data.valid_paths=['{}']", "tokenizer.name={}", "model.name={}", "run_dir={}"],
        "cells": ["data.paths=['{}']", "data.gene_vocab={}", "fetch_dir={}"],
        "images": ["data.root={}", "model.name={}", "training.checkpoint_dir={}"],
        "segmentation": ["data.root={}"],
        "tests.config.test_paths:Own": ["data.folder={}"],
    }
    sources = {"chess": "local", "cells": "local", "images": "folder", "segmentation": "folder"}
    for task, overrides in keys.items():
        more = [f"data.source={sources[task]}"] if task in sources else []
        config = parse_config(f"task: {task}", [*(each.format(written) for each in overrides), *more])
        values = config.model_dump()
        for each in overrides:
            value: object = values
            for part in each.partition("=")[0].split("."):
                assert isinstance(value, dict)
                value = value[part]
            assert value in ("/of/mine/x", ["/of/mine/x"]), each


def test_an_unset_variable_is_named_with_its_key_and_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOWHERE", raising=False)
    text = "task: chess\ndata:\n  source: local\n  paths: [a.jsonl, $NOWHERE/b.jsonl]\nrun_dir: ${NOWHERE}\n"
    with pytest.raises(ConfigError) as caught:
        parse_config(text, where="my.yaml")
    assert "my.yaml, line 4: data.paths.1" in str(caught.value)
    assert "my.yaml, line 5: run_dir" in str(caught.value)
    assert str(caught.value).count("NOWHERE is not set") == 2


def test_text_that_is_no_path_and_dollars_that_name_nothing_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHERE", "/of/mine")
    config = parse_config("task: chess", ["name=$WHERE", "run_dir=5$/a~b", "training.wandb_project=~x"])
    assert (config.name, config.run_dir, config.training.wandb_project) == ("$WHERE", "5$/a~b", "~x")


def test_an_empty_folder_name_is_still_refused() -> None:
    with pytest.raises(ConfigError, match="fetch_dir"):
        parse_config("task: chess", ["fetch_dir=''"])


def test_what_is_read_again_by_a_rank_is_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from shardwise.config.load import config_from_values, config_values

    monkeypatch.setenv("WHERE", str(tmp_path))
    values = config_values(parse_config("task: chess", ["run_dir=$WHERE/run"]))
    monkeypatch.delenv("WHERE")
    assert config_from_values(values).run_folder == f"{tmp_path}/run"
