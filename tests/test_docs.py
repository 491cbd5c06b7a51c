"""What the README and the docs say is true: every command runs, every example is the file it claims to be."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import tomllib
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import pytest

from shardwise.cli import VERBS
from shardwise.config.reference import reference_of_all
from tests.cli.program import BIN, run_program
from tests.conftest import REPOSITORY, clean_environment

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w+)(?: title=(\S+))?\n(.*?)^```", re.MULTILINE | re.DOTALL)
# The commands of the docs, made small enough to run in a test; nothing else about them is changed. Nearly all of the time
# that they take is spent on importing torch, once per process: one rank, and no loader processes, unless they are the point.
SMALL = {
    "chess": "data.num_games=40 data.max_plies=8 model.hidden_dim=16",
    "cells": "data.num_cells=200 model.hidden_dim=16",
    "segmentation": "data.num_subjects=4 data.volume_size=[16,16,16] data.size=[16,16,16] data.num_workers=0",
    "images": "data.num_images=100 data.num_workers=0 training.batch_size=8",
}
ON_ITS_OWN_RANKS = "shardwise train configs/chess-tiny.yaml"
"""The command of which the page says how many ranks it starts."""


@dataclass(frozen=True)
class Fence:
    language: str
    title: str
    content: str


def fences(page: Path) -> list[Fence]:
    return [Fence(*groups) for groups in FENCE.findall(page.read_text())]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_on_the_page_runs(page: Path, pages_run: dict[Path, Future[None]]) -> None:
    pages_run[page].result()


@pytest.fixture(scope="module")
def pages_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Future[None]]:
    """What came of each page that is asked for. They ran side by side, those with most commands first."""
    asked = [item for item in request.session.items if "pages_run" in getattr(item, "fixturenames", ())]
    pages: list[Path] = [item.callspec.params["page"] for item in asked]  # type: ignore[attr-defined]
    pages.sort(key=lambda page: len(commands_on(page)), reverse=True)
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(max(2, (os.cpu_count() or 1) // 2)) as pool:
        clean_environment(patch)
        patch.setenv("OMP_NUM_THREADS", "1")  # with more, pages side by side wait for each other
        patch.setenv("PET_STANDALONE", "1")  # each torchrun finds a port of its own
        return {page: pool.submit(run_page, page, tmp_path_factory.mktemp(page.stem)) for page in pages}


def run_page(page: Path, folder: Path) -> None:
    for name in ("configs", "Makefile", "pyproject.toml", "constraints.txt"):
        (folder / name).symlink_to(REPOSITORY / name)
    for fence in fences(page):
        if fence.title:
            (folder / fence.title).write_text(fence.content)
    for command in commands_on(page):
        done = outcome_of(command, folder)
        assert done.returncode == 0, f"{page.name}: {command}\n{done.stdout}\n{done.stderr}"


def outcome_of(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """`verify` reads nothing of the folder but the config, and leaves nothing there: what came of it holds on every page."""
    if not command.startswith("shardwise verify configs/"):
        return run_program(small(command), folder, SHARDWISE_CACHE=str(folder / "cache"))
    with _verifying:
        if command not in _verified:
            _verified[command] = run_program(small(command), folder, SHARDWISE_CACHE=str(folder / "cache"))
        return _verified[command]


_verified: dict[str, subprocess.CompletedProcess[str]] = {}
_verifying = Lock()


def commands_on(page: Path) -> list[str]:
    return [line for fence in fences(page) if fence.language == "bash" for line in fence.content.strip().splitlines()]


def small(command: str) -> list[str]:
    words = shlex.split(command)
    if words[0] == "make":
        return ["make", "-n", *words[1:]]
    config = next((word for word in words if word.startswith("configs/")), None)
    changes = SMALL[Path(config).stem.partition("-")[0]].split() if config else []
    if "train" in words:
        # A run that is resumed goes on: it has one more step to do.
        changes.append(f"training.max_steps={2 if '--resume' in words else 1}")
        if words[0] != "torchrun" and "num_gpus" not in command and command != ON_ITS_OWN_RANKS:
            changes.append("training.num_gpus=1")
    words += [word for change in changes for word in ("--set", change)]
    return [str(BIN / words[0]) if (BIN / words[0]).exists() else words[0], *words[1:]]


def test_examples_in_the_docs_are_the_files_in_examples() -> None:
    titled = [fence for page in PAGES for fence in fences(page) if fence.title]
    assert {fence.title for fence in titled} == {
        file.name for file in (REPOSITORY / "examples").iterdir() if file.is_file()
    }
    for fence in titled:
        assert fence.content == (REPOSITORY / "examples" / fence.title).read_text(), fence.title


def test_the_page_of_keys_is_the_schema() -> None:
    assert (REPOSITORY / "docs" / "config.md").read_text().endswith(reference_of_all())


def test_yaml_on_the_pages_is_accepted() -> None:
    from shardwise.config import parse_config

    blocks = [fence.content for page in PAGES for fence in fences(page) if fence.language == "yaml" and not fence.title]
    assert blocks
    for block in blocks:
        parse_config(block)


def test_the_error_shown_in_the_readme_is_the_error_one_gets(tmp_path: Path) -> None:
    shown = next(
        line for line in (REPOSITORY / "README.md").read_text().splitlines() if line.startswith("error: chess.yaml")
    )
    (tmp_path / "chess.yaml").write_text("task: chess\n\n\n\n\ntraining:\n  batch_sze: 4\n")
    done = run_program([str(BIN / "shardwise"), "config", "show", "chess.yaml"], tmp_path)
    assert done.stderr.strip() == shown


def test_the_readme_lists_every_verb() -> None:
    rows = re.findall(r"^\| `shardwise (\w+)` \|.*\|$", (REPOSITORY / "README.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(VERBS)


def test_links_on_the_pages_lead_somewhere() -> None:
    for page in [*PAGES, REPOSITORY / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_make_train_and_ci_do_what_the_readme_says() -> None:
    plan = subprocess.run(
        ["make", "-n", "-C", str(REPOSITORY), "train"], capture_output=True, text=True, check=True
    ).stdout
    assert "shardwise train configs/chess-tiny.yaml --fresh" in plan
    assert "make test" in (REPOSITORY / ".ci" / "run").read_text()
    assert "make test" in (REPOSITORY / ".github" / "workflows" / "test.yml").read_text()


def test_every_extra_that_an_error_may_name_exists() -> None:
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = set(
        re.findall(
            r'MissingExtra\.of\([^,]+, "(\w+)"', "".join(f.read_text() for f in (REPOSITORY / "src").rglob("*.py"))
        )
    )
    assert named == extras.keys() - {"dev", "all"}, "what nothing asks for goes; what is asked for is there"
    assert extras["all"] == [f"shardwise[{','.join(name for name in extras if name in named)}]"]


def test_commands_on_the_pages_are_found_by_the_test() -> None:
    """A page whose commands are no longer recognised would pass for free."""
    commands = [command for page in PAGES for command in commands_on(page)]
    assert len([command for command in commands if "shardwise" in command]) >= 10
    assert shutil.which("make")
