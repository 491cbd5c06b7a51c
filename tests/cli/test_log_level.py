"""`--quiet` and `--log-level`: of every verb, followed by every rank, whoever started it."""

from __future__ import annotations

import argparse
import importlib
import os
from pathlib import Path

import pytest

from shardwise.cli import VERBS, _parser, main
from shardwise.watch.console import LOG_LEVEL
from tests.cli.program import BIN, run_program, shardwise
from tests.cli.test_train import write

ONE_STEP = ("--fresh", "--set", "training.max_steps=1")


def test_with_quiet_a_training_on_two_ranks_that_goes_well_says_nothing(tmp_path: Path) -> None:
    write(tmp_path)
    done = shardwise(tmp_path, "train", "ragged.yaml", "--quiet", *ONE_STEP)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "runs/ragged/checkpoints/step-00000001").is_dir()
    told = shardwise(tmp_path, "train", "ragged.yaml", *ONE_STEP, SHARDWISE_LOG_LEVEL="warning")
    assert (told.returncode, told.stdout, told.stderr) == (0, "", ""), "the environment says the same"


def test_with_quiet_a_restart_is_told_all_the_same(tmp_path: Path) -> None:
    write(tmp_path, "Faulty")
    done = shardwise(tmp_path, "train", "ragged.yaml", "--quiet", "--set", "training.max_steps=2", FAULTS="kill:1:2")
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[0].startswith("rank 1 was killed by SIGKILL in step 2")
    assert done.stderr.splitlines()[1].startswith("restart 1 of 3: ")
    assert "loss" not in done.stdout


def test_ranks_of_torchrun_follow_the_level_too(tmp_path: Path) -> None:
    write(tmp_path)
    command = [str(BIN / "torchrun"), "--nproc-per-node", "2", "-m", "shardwise", "train", "ragged.yaml"]
    done = run_program([*command, "--log-level", "error", *ONE_STEP], tmp_path)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "rank" not in done.stderr


def test_with_debug_the_launcher_says_what_it_does(tmp_path: Path) -> None:
    write(tmp_path)
    done = shardwise(tmp_path, "train", "ragged.yaml", "--log-level", "debug", *ONE_STEP)
    assert done.returncode == 0 and "debug: attempt 1: the ranks of this machine are started\n" in done.stderr
    assert "[rank 0] step 1/1" in done.stdout


def test_with_quiet_the_result_of_a_verb_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path)
    config = str(tmp_path / "ragged.yaml")
    assert main(["config", "show", config]) == 0
    loud = capsys.readouterr().out
    assert main(["config", "show", config, "--quiet"]) == main(["config", "--quiet", "show", config]) == 0
    assert capsys.readouterr().out == loud * 2
    assert main(["config", "show", "nowhere.yaml", "--quiet"]) == 2
    assert capsys.readouterr().err.startswith("error: there is no config file nowhere.yaml")
    assert LOG_LEVEL not in os.environ, "main leaves the environment as it found it"


def every_parser(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    below = [action.choices.values() for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return [parser, *(each for parsers in below for one in parsers for each in every_parser(one))]


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_and_every_action_of_it_takes_both(verb: str) -> None:
    assert hasattr(importlib.import_module(f"shardwise.cli.{verb}"), "run")
    verbs = next(action for action in _parser([verb])._actions if isinstance(action, argparse._SubParsersAction))
    for parser in every_parser(verbs.choices[verb]):
        assert "--log-level" in parser.format_help() and "--quiet" in parser.format_help(), parser.prog


def test_both_at_once_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "a.yaml", "--quiet", "--log-level", "debug"])
    assert "not allowed with argument" in capsys.readouterr().err
