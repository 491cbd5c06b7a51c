"""Ranks for a few seconds: how each ended, what it said, and where it was when it hung."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from shardwise.errors import DataError
from shardwise.launch.group import RankGroup, log_file
from shardwise.launch.server import start_server
from shardwise.parallel import World
from shardwise.watch.diagnosis import Kind
from shardwise.watch.heartbeats import Phase, beat


def meet(word: str) -> int:
    world = World.join("cpu")
    print(word, world.rank, world.sum(1), os.environ.get("GREETING"), Path.cwd())
    world.leave()
    return 3 * world.rank


def end_differently() -> int:
    rank = int(os.environ["RANK"])
    if rank == 1:
        raise DataError("the cause")
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return 0


def wait_for_one_that_sleeps() -> int:
    world = World.join("cpu")
    beat(Phase.AGREE, 5)
    if world.rank == 1:
        time.sleep(1000)
    dist.barrier()
    return 0


def wait_for_one_that_left() -> int:
    beat(Phase.COMPUTE, 2)
    time.sleep(1000 if os.environ["RANK"] == "1" else 0)
    return 0


def start(entry: object, ranks: int, folder: Path, hang_timeout: float = 1000.0, **options: object) -> RankGroup:
    start_server([])
    group = RankGroup(entry, options.pop("args", ()), ranks, folder, hang_timeout, **options)  # type: ignore[arg-type]
    give_up = time.monotonic() + 60
    try:
        while not group.ended():
            assert time.monotonic() < give_up
            time.sleep(0.02)
    finally:
        group.end()
    return group


def test_ranks_meet_print_into_their_logs_and_leave_their_exit_codes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "7")  # of whatever this process is part of
    group = start(meet, 2, tmp_path / "group", args=("hello",), environment={"GREETING": "hi"})
    assert [each.exit_code for each in group.sightings()] == [0, 3]
    assert log_file(tmp_path / "group", 1).read_text() == f"hello 1 [2.0] hi {Path.cwd()}\n"
    assert group.hang is None


def test_an_error_and_a_kill_are_told_apart_by_rank(tmp_path: Path) -> None:
    seen = start(end_differently, 3, tmp_path).sightings()
    assert [each.exit_code for each in seen] == [0, 1, -signal.SIGKILL]
    assert [each.error.message if each.error else None for each in seen] == [None, "the cause", None]


def test_a_hang_is_ended_and_told_with_the_place(tmp_path: Path) -> None:
    group = start(wait_for_one_that_sleeps, 2, tmp_path, hang_timeout=2.0)
    assert group.hang is not None and (group.hang.kind, group.hang.guilty, group.hang.step) == (Kind.HANG, (1,), 5)
    assert "test_group.py" in group.hang.sentence and "rank 0 waits in barrier of step 5" in group.hang.sentence
    assert [each.exit_code for each in group.sightings()] == [None, None]


def test_a_rank_that_another_has_left_behind_is_not_waited_for_as_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwise.launch.group.ALONE", 1.0)
    seen = start(wait_for_one_that_left, 2, tmp_path).sightings()
    assert [each.exit_code for each in seen] == [0, None]
