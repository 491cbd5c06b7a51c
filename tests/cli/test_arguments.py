"""The config of a verb, by place or as an option; a sign of life while PyTorch is imported."""

from __future__ import annotations

import argparse
import importlib
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.cli import _parser
from tests.cli.program import environment

VERBS = ["train", "verify", "drill", "fetch", "config show", "config advise", "bench data", "data shard --to x"]


def parsed(words: str) -> argparse.Namespace:
    return _parser(words.split()).parse_args(words.split())


@pytest.mark.parametrize("verb", VERBS)
def test_a_config_may_be_an_option(verb: str) -> None:
    for words in ("my.yaml", "--config my.yaml", "--config=my.yaml", "--set a=b my.yaml", "--set a=b --config my.yaml"):
        assert parsed(f"{verb} {words}").config == "my.yaml", words


@pytest.mark.parametrize("verb", VERBS)
def test_no_config_and_two_configs_are_told(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words, told in (("", "required: config"), ("a.yaml --config b.yaml", "two: a.yaml and b.yaml")):
        with pytest.raises(SystemExit):
            parsed(f"{verb} {words}")
        assert told in capsys.readouterr().err


def test_every_verb_that_takes_a_config_is_among_them() -> None:
    folder = Path(str(importlib.import_module("shardwise.cli").__file__)).parent
    taking = {file.stem for file in folder.glob("*.py") if "add_config_arguments(" in file.read_text()} - {"arguments"}
    assert taking == {verb.split()[0] for verb in VERBS}


@pytest.mark.parametrize(("words", "told"), [("", True), ("--quiet", False)], ids=["usual", "quiet"])
def test_a_terminal_is_told_that_pytorch_is_loaded(tmp_path: Path, words: str, told: bool) -> None:
    (tmp_path / "my.yaml").write_text("task: own\n")
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "shardwise", "config", "show", "my.yaml", *words.split()]
    subprocess.run(command, cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL, stderr=theirs, timeout=120)
    os.close(theirs)
    said = b""
    try:
        while part := os.read(ours, 1000):
            said += part
    except OSError:  # how Linux says that the other end is closed
        pass
    os.close(ours)
    assert (b"loading PyTorch" in said) is told
