"""What a config calls by name is found among what comes with shardwise and what installed packages add."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from shardwise.config import parse_config, registry
from shardwise.config.load import load_task_class
from shardwise.config.registry import BUILT_IN, Group, found, known, load, lookup
from shardwise.errors import ConfigError, ShardwiseError

GROUPS: tuple[Group, ...] = get_args(Group)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed packages."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def install(site: Path, package: str, entries: str, **modules: str) -> None:
    metadata = site / f"{package}-2.5.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 2.5\n")
    (metadata / "entry_points.txt").write_text(entries)
    for name, source in modules.items():
        (site / f"{name}.py").write_text(source)


@pytest.mark.parametrize("group", GROUPS)
def test_an_entry_point_of_any_group_is_found_and_only_then_imported(site: Path, group: Group) -> None:
    assert "mine" not in known(group)
    module = f"module_of_{group.rpartition('.')[2]}"
    install(site, "some-package", f"[{group}]\nmine = {module}:Mine\n", **{module: "class Mine: ...\n"})
    assert list(found(group)) == ["mine"] and known(group) == [*BUILT_IN.get(group, {}), "mine"]
    entry = lookup(group, "mine")
    assert entry is not None and module not in sys.modules
    assert load(entry).__name__ == "Mine" and module in sys.modules


def test_a_name_that_comes_with_shardwise_cannot_be_taken(site: Path) -> None:
    install(site, "taker", "[shardwise.tasks]\nchess = no_such_module:Chess\n")
    assert known("shardwise.tasks") == ["chess", "cells", "segmentation", "images"]
    assert load_task_class("chess").__name__ == "ChessTask"


def test_what_is_built_in_is_found_without_reading_the_metadata_of_all_packages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(**_: Any) -> None:
        raise AssertionError("metadata was read")

    monkeypatch.setattr(registry, "entry_points", refuse)
    config = parse_config("task: chess\ntraining: {logger: [tensorboard, none]}")
    assert load_task_class(config.task).__name__ == "ChessTask"
    assert parse_config("task: tests.tasks:Ragged").task == "tests.tasks:Ragged"
    with pytest.raises(AssertionError, match="metadata was read"):
        parse_config("task: unknown")


def test_a_name_in_two_packages_is_an_error_that_names_both(site: Path) -> None:
    for package in ("one", "other"):
        install(site, package, "[shardwise.tasks]\nmine = somewhere:Mine\n")
    with pytest.raises(ShardwiseError) as caught:
        parse_config("task: mine")
    message = str(caught.value)
    assert message.startswith("'mine' of shardwise.tasks is in two packages: ")
    assert "one 2.5" in message and "other 2.5" in message and message.endswith("Uninstall one of them")


@pytest.mark.parametrize(
    ("target", "source", "said"),
    [
        (
            "broken_a:Mine",
            "import no_such_module_anywhere",
            "ModuleNotFoundError: No module named 'no_such_module_anywhere'",
        ),
        ("broken_b:Mine", "", "AttributeError: module 'broken_b' has no attribute 'Mine'"),
        ("broken_c:Mine", "1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
def test_what_is_broken_in_a_package_is_told_with_its_name(site: Path, target: str, source: str, said: str) -> None:
    module = target.partition(":")[0]
    install(site, "fragile", f"[shardwise.tasks]\nmine = {target}\n", **{module: source})
    with pytest.raises(ShardwiseError) as caught:
        parse_config("task: mine")
    assert str(caught.value) == (
        f"'mine' of the package fragile 2.5 cannot be loaded from {target}: {said}. "
        f"The whole traceback:  python -c 'import {module}'"
    )


def test_an_error_for_people_of_a_package_is_told_as_it_is(site: Path) -> None:
    source = "from shardwise.errors import MissingExtra\nraise MissingExtra('needs the package x: pip install x')\n"
    install(site, "wanting", "[shardwise.tasks]\nmine = wanting_a:Mine\n", wanting_a=source)
    with pytest.raises(ShardwiseError, match=r"^needs the package x: pip install x$"):
        parse_config("task: mine")


def test_a_task_that_is_no_class_is_refused(site: Path) -> None:
    install(site, "odd", "[shardwise.tasks]\nmine = odd_a:mine\n", odd_a="mine = 5\n")
    with pytest.raises(ConfigError, match=r"^my\.yaml: task: mine stands for odd_a:mine, which is not a class$"):
        parse_config("task: mine", where="my.yaml")


def test_help_reads_no_metadata() -> None:
    program = (
        "import sys; from shardwise.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print('importlib.metadata' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "False"
