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


PATHS = {
    "train": ["--config", "--resume"],
    "verify": ["--config", "--against"],
    "drill": ["--config", "--folder", "--report"],
    "fetch": ["--config", "--to"],
    "config show": ["--config"],
    "config advise": ["--config"],
    "bench data": ["--config"],
    "data shard": ["--config", "--to"],
    "data verify": ["folder"],
    "checkpoint list": ["run"],
    "checkpoint verify": ["run"],
    "checkpoint repair": ["run"],
    "export": ["run", "--to", "--checkpoint", "--config"],
}
"""Every argument that is a path."""


@pytest.mark.parametrize(("verb", "name"), [(verb, name) for verb, names in PATHS.items() for name in names])
def test_a_home_folder_is_found_where_the_shell_leaves_it_to_the_program(
    verb: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of `--to=~/a`, and of anything in quotes: as it is pasted from what the program has said."""
    monkeypatch.setenv("HOME", "/home/me")
    options = {each: "there" for each in PATHS[verb] if each.startswith("-")}
    words = [verb.split()[0], *verb.split()[1:], *(each for each in PATHS[verb] if not each.startswith("-"))]
    if name.startswith("-"):
        options[name] = "~/a b"
    else:
        words[words.index(name)] = "~/a b"
    given = [*words, *(f"{option}={value}" for option, value in options.items())]
    assert vars(_parser(given).parse_args(given))[name.removeprefix("--")] == "/home/me/a b"


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
