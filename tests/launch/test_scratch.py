"""Scratch folders end with their process, or with the next one that starts."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shardwise.launch.scratch import HELD, holding, scratch_folder, sweep

HOLDS_ONE = """
from shardwise.launch.scratch import scratch_folder
with scratch_folder() as folder:
    (folder / "logs").mkdir()
    print(folder, flush=True)
    input()
"""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


@contextmanager
def another() -> Iterator[tuple[subprocess.Popen[str], Path]]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS_ONE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        yield process, Path(process.stdout.readline().strip())
    finally:
        process.kill()
        process.communicate()


def test_the_folder_of_a_killed_launcher_goes_when_the_next_one_starts(tmp_path: Path) -> None:
    with another() as (_, alive), another() as (killed, left):
        killed.kill()
        killed.wait()
        assert (left / "logs").is_dir()
        with scratch_folder() as own:
            assert not left.exists()
            assert alive.is_dir() and own.is_dir()
            sweep()
            assert own.is_dir(), "its own process is alive"
    assert not own.exists()


def test_it_is_of_this_user_alone() -> None:
    with scratch_folder() as own:
        assert stat.S_IMODE(own.stat().st_mode) == 0o700


def test_folders_of_others_and_folders_of_another_kind_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_run, of_somebody, link = (tmp_path / f"shardwise-{name}" for name in ("my-run", "somebody", "link"))
    a_run.mkdir()
    (a_run / ".lock").touch()
    of_somebody.mkdir()
    with holding(of_somebody):
        pass
    assert (of_somebody / HELD).exists()
    link.symlink_to(of_somebody)
    with monkeypatch.context() as other:
        other.setattr(os, "getuid", lambda: of_somebody.stat().st_uid + 1)
        sweep()
    assert a_run.is_dir() and of_somebody.is_dir()
    sweep()
    assert a_run.is_dir() and link.is_symlink() and not of_somebody.exists()
