"""A folder is the one that it was, or what became of it is said."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path

import pytest

from shardwise.errors import StorageLost
from shardwise.watch.held_folder import HeldFolder
from shardwise.watch.run_folder import RunFolder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run" / "ranks").mkdir(parents=True)
    return tmp_path / "run"


def test_what_happens_inside_it_or_above_it_is_nothing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parent)
    held = HeldFolder(Path("run"), "run folder")
    shutil.rmtree(run / "ranks")
    (run.parent / "other").mkdir()
    monkeypatch.chdir("/")
    assert held.lost() == ""
    held.confirm()


@pytest.mark.parametrize("anew", [False, True])
def test_one_that_was_deleted_is_told_even_if_another_has_its_name(run: Path, anew: bool) -> None:
    held = HeldFolder(run, "run folder")
    shutil.rmtree(run)
    if anew:
        run.mkdir()
    with pytest.raises(StorageLost) as lost:
        held.confirm()
    more = ", and another folder is in its place" if anew else ""
    assert str(lost.value) == (
        f"the run folder {run} was deleted while the run was going on{more}. Whatever the run does from here on would be lost: "
        "it ends. Bring the folder back to where it was, and go on from the last checkpoint in it"
    )


@pytest.mark.parametrize("anew", [False, True])
def test_one_that_was_moved_is_told_with_where_it_went(run: Path, anew: bool) -> None:
    held = HeldFolder(run, "run folder")
    run.rename(moved := run.with_name("moved"))
    if anew:
        run.mkdir()
    assert held.lost() == (
        f"the run folder {run} was moved to {moved} while the run was going on"
        + (", and another folder is in its place" if anew else "")
    )


def test_storage_that_does_not_answer_is_not_lost(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = HeldFolder(run, "run folder")

    def stale(path: Path) -> os.stat_result:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(Path, "stat", stale)
    with pytest.raises(OSError, match="Stale file handle"):
        held.lost()


# ---------------------------------------------------------------- the logs in it


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("shardwise"), "propagate", True)
    return caplog


def steps(file: Path) -> list[int]:
    return [json.loads(line)["step"] for line in file.read_text().splitlines()]


@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_metrics_go_on_in_a_new_file_where_theirs_is_gone(run: Path, said: pytest.LogCaptureFixture, how: str) -> None:
    folder = RunFolder(run)
    folder.hold()
    folder.add_metrics({"step": 1})
    if how == "deleted":
        folder.metrics_file.unlink()
    else:  # as editors save
        (run / "edited").write_text('{"step": 0}\n')
        (run / "edited").rename(folder.metrics_file)
    for step in (2, 3):
        folder.add_metrics({"step": step})
    folder.close()
    assert steps(folder.metrics_file) == ([2, 3] if how == "deleted" else [0, 2, 3])
    assert said.messages == [
        f"{run / 'metrics.jsonl'} was deleted or replaced while the run is going on: its earlier lines are gone"
    ]


@pytest.mark.parametrize("how", ["deleted", "moved"])
def test_no_file_is_made_where_another_folder_lies_now(run: Path, said: pytest.LogCaptureFixture, how: str) -> None:
    folder = RunFolder(run)
    folder.hold()
    folder.add_metrics({"step": 1})
    if how == "deleted":
        shutil.rmtree(run)
    else:
        run.rename(run.with_name("moved"))
    (run / "ranks").mkdir(parents=True)
    for step in (2, 3):
        folder.add_metrics({"step": step})
        folder.add_telemetry({"step": step})
    folder.close()
    assert [str(path.relative_to(run)) for path in run.rglob("*")] == ["ranks"]
    assert [message.partition(" ")[0] for message in said.messages] == ["the", "the"], "once of each file"
    assert all("metrics.jsonl is not written here any more" in each for each in said.messages[:1])
    if how == "moved":
        assert steps(run.with_name("moved") / "metrics.jsonl") == [1, 2, 3]


def test_a_task_that_changes_the_working_folder_takes_nothing_away(
    run: Path, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parent)
    folder = RunFolder(Path("run"))
    folder.hold()
    folder.add_metrics({"step": 1})
    monkeypatch.chdir("/")
    folder.add_metrics({"step": 2})
    folder.add_telemetry({"step": 2})
    assert steps(run / "metrics.jsonl") == [1, 2] and steps(run / "ranks" / "rank-0000.jsonl") == [2]
    assert said.messages == []
