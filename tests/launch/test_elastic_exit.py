"""A rank that is killed when it is done keeps nobody waiting; one that dies before is seen before others are ended."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic import multiprocessing as elastic
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes

from shardwise.launch.elastic_exit import Finished, ending_well


def _wait(finished: Any, told: Connection) -> None:
    told.send("waiting")
    finished.wait()
    told.send("woken")


@pytest.mark.slow
def test_those_who_are_left_are_let_go_though_one_has_died_waiting() -> None:
    context = multiprocessing.get_context("forkserver")
    finished = Finished(2, "forkserver")
    ranks = []
    for _ in range(2):
        ours, theirs = context.Pipe()
        process = context.Process(target=_wait, args=(finished, theirs))
        process.start()
        ranks.append((process, ours))
    for _, pipe in ranks:
        assert pipe.poll(60) and pipe.recv() == "waiting"
    time.sleep(0.3)  # from here on it waits
    (dead, _), (alive, pipe) = ranks
    dead.kill()
    dead.join(10)
    setting = threading.Thread(target=finished.set, daemon=True)
    setting.start()
    setting.join(10)
    assert not setting.is_alive()
    assert pipe.poll(10) and pipe.recv() == "woken"
    alive.join(10)
    assert alive.exitcode == 0


def _started(entrypoint: Callable[..., int], folder: Path, one_died: Callable[[], None]) -> Any:
    """Two ranks, as the agent starts them."""
    with ending_well(one_died):
        context = start_processes(
            name="rank",
            entrypoint=entrypoint,
            args={0: (str(folder),), 1: (str(folder),)},
            envs={0: {"LOCAL_RANK": "0"}, 1: {"LOCAL_RANK": "1"}},
            logs_specs=DefaultLogsSpecs(log_dir=str(folder)),
            start_method="forkserver",
        )
    assert elastic.MultiprocessContext is not type(context)
    return context


def _done(folder: str) -> int:
    (Path(folder) / f"{os.environ['LOCAL_RANK']}.pid").write_text(str(os.getpid()))
    return 3


@pytest.mark.slow
def test_the_agents_ranks_wait_so(tmp_path: Path) -> None:
    """Killed between its return and everybody's: the agent hears of it instead of waiting for ever."""
    context = _started(_done, tmp_path, one_died=lambda: None)
    while any(context._ret_vals[rank].empty() for rank in (0, 1)):
        time.sleep(0.05)
    time.sleep(0.3)
    # After it has looked for the dead, and before it lets those go who wait.
    let_go = context._worker_finished_event.set
    killed = int((tmp_path / "1.pid").read_text())

    def killed_first() -> None:
        os.kill(killed, signal.SIGKILL)
        time.sleep(0.3)
        let_go()

    context._worker_finished_event.set = killed_first
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.append(context.wait(30)), daemon=True)
    waiting.start()
    waiting.join(30)
    assert not waiting.is_alive()
    (result,) = found
    assert set(result.failures) == {1} and result.failures[1].exitcode == -signal.SIGKILL


def _busy(folder: str) -> int:
    time.sleep(60)
    return 0


@pytest.mark.slow
def test_who_has_died_is_seen_before_any_other_is_ended(tmp_path: Path) -> None:
    """A signal to the others, or an end of theirs, would make it look as if they had been first."""
    seen: list[list[int | None]] = []

    def one_died() -> None:
        time.sleep(0.5)  # long enough for a signal to arrive
        seen.append([process.exitcode for process in context._pc.processes])
        for process in context._pc.processes:
            process.kill()

    context = _started(_busy, tmp_path, one_died)
    assert context.wait(0) is None and not seen
    os.kill(context.pids()[1], signal.SIGKILL)
    result = context.wait(30)
    assert seen == [[None, -signal.SIGKILL]]
    assert set(result.failures) == {1} and result.failures[1].exitcode == -signal.SIGKILL
    assert not any(process.is_alive() for process in context._pc.processes)
