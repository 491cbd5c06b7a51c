"""Signs of life: written into a mapped page, read by another process; and the kernel's word."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.watch import procfs
from shardwise.watch.heartbeats import Phase, beat, begin_heartbeats, end_heartbeats, file_of, read_heartbeats
from shardwise.watch.procfs import MemoryWord, children_of, cpu_seconds, is_same_process, state_of
from shardwise.watch.watchdog import Watchdog


@pytest.fixture
def beating(tmp_path: Path) -> Iterator[Path]:
    begin_heartbeats(tmp_path, rank=3, world=4)
    yield tmp_path
    end_heartbeats()


def test_a_beat_says_who_does_what_since_when(beating: Path) -> None:
    beat(Phase.COMPUTE, 41)
    first = read_heartbeats(beating)[3]
    assert (first.rank, first.world, first.pid, first.phase, first.step) == (3, 4, os.getpid(), Phase.COMPUTE, 41)
    assert 0 <= time.monotonic() - first.since < 60
    beat(Phase.UPDATE)
    second = read_heartbeats(beating)[3]
    assert (second.phase, second.step, second.counter) == (Phase.UPDATE, 41, first.counter + 1)


def test_without_a_folder_a_beat_does_nothing() -> None:
    end_heartbeats()
    beat(Phase.COMPUTE, 1)


def test_a_file_that_is_no_beat_is_passed_over(beating: Path) -> None:
    file_of(beating, 7).write_bytes(b"x" * 300)
    file_of(beating, 8).write_bytes(b"")
    assert set(read_heartbeats(beating)) == {3}


def test_every_phase_has_words() -> None:
    assert all(phase.words for phase in Phase)
    assert [phase for phase in Phase if phase.startup] == [Phase.START, Phase.PREPARE, Phase.RESUME]


def test_a_rank_that_beats_is_left_alone_and_one_that_does_not_is_judged(beating: Path, tmp_path: Path) -> None:
    overseer = Watchdog(beating, tmp_path / "run", hang_timeout=1e-9)
    beat(Phase.COMPUTE, 1)
    assert overseer.look() is None
    beat(Phase.COMPUTE, 2)
    assert overseer.look() is None, "it has beaten since"
    verdict = overseer.look()
    assert verdict is not None and verdict.guilty == (3,)


def test_a_rank_that_starts_up_and_works_is_no_hang(
    beating: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overseer = Watchdog(beating, tmp_path / "run", hang_timeout=1e-9)
    used = 0.0

    def cpu(pid: int) -> float:
        nonlocal used
        used += 1000.0
        return used

    monkeypatch.setattr("shardwise.watch.watchdog.cpu_seconds", cpu)
    beat(Phase.PREPARE, 0)
    assert [overseer.look() for _ in range(3)] == [None] * 3
    monkeypatch.setattr("shardwise.watch.watchdog.cpu_seconds", lambda pid: used)
    assert overseer.look() is not None


def test_the_kernel_says_what_state_a_process_is_in() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        assert process.pid in children_of(os.getpid())
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        assert state_of(process.pid) == "T"
        process.send_signal(signal.SIGCONT)
    finally:
        process.kill()
        process.wait()
    assert state_of(process.pid) == "" and cpu_seconds(process.pid) == 0.0
    assert cpu_seconds(os.getpid()) > 0


def test_a_counter_of_the_control_group_that_went_up_is_the_kernels_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = tmp_path / "memory.events"
    events.write_text("low 0\noom 0\noom_kill 2\n")
    monkeypatch.setattr(procfs, "_oom_files", lambda: [events, tmp_path / "absent"])
    monkeypatch.setattr(procfs, "_open_log", lambda: None)
    word = MemoryWord()
    assert word.on(1) is None
    events.write_text("low 0\noom 1\noom_kill 3\n")
    assert word.on(1) == f"{events} counts 1 more"
    assert word.on(2) is None, "the next kill is another matter"


def test_the_kernels_log_names_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    monkeypatch.setattr(procfs, "_oom_files", list)
    monkeypatch.setattr(procfs, "_open_log", lambda: reader)
    word = MemoryWord()
    os.write(writer, b"3,100,5,-;Memory cgroup out of memory: Killed process 4711 (python) total-vm:1kB\n")
    assert word.on(4712) is None
    said = word.on(4711)
    assert said is not None and "Killed process 4711" in said
    os.close(reader), os.close(writer)


def test_the_overseer_needs_neither_torch_nor_pydantic() -> None:
    """Where others started the ranks it is a process of its own, which must be small."""
    check = "import sys, shardwise.watch.watchdog; sys.exit(', '.join({'torch', 'pydantic', 'numpy'} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_a_job_that_was_stopped_as_a_whole_is_no_hang(
    beating: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-Z and fg, or a scheduler that suspends: the overseer stood still as long as the ranks."""
    overseer = Watchdog(beating, tmp_path / "run", hang_timeout=600.0)
    beat(Phase.COMPUTE, 1)
    assert overseer.look() is None
    now = time.monotonic()
    monkeypatch.setattr("shardwise.watch.watchdog.time.monotonic", lambda: now + 3600.0)
    assert overseer.look() is None
    monkeypatch.setattr("shardwise.watch.watchdog.time.monotonic", lambda: now + 3605.0)
    assert overseer.look() is None


def test_while_one_rank_prepares_the_others_wait_for_it(
    beating: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overseer = Watchdog(beating, tmp_path / "run", hang_timeout=1e-9)
    beat(Phase.PREPARE, 0)
    own = file_of(beating, 3).read_bytes()
    waiting = bytearray(own)
    waiting[8:12] = os.getppid().to_bytes(4, "little")  # another process, alive
    waiting[12:16] = (4).to_bytes(4, "little")
    file_of(beating, 4).write_bytes(waiting)
    used = {os.getpid(): 0.0, os.getppid(): 0.0}

    def cpu(pid: int) -> float:
        used[pid] += 1000.0 if pid == os.getpid() else 0.0  # rank 3 works, rank 4 waits for it
        return used[pid]

    monkeypatch.setattr("shardwise.watch.watchdog.cpu_seconds", cpu)
    assert [overseer.look() for _ in range(3)] == [None] * 3
    monkeypatch.setattr("shardwise.watch.watchdog.cpu_seconds", lambda pid: used[pid])
    assert overseer.look() is not None


def test_what_an_earlier_job_left_behind_is_nobody(beating: Path, tmp_path: Path) -> None:
    """Its process is gone, and a stranger may have its number."""
    overseer = Watchdog(beating, tmp_path / "run", hang_timeout=1e-9)
    beat(Phase.COMPUTE, 1)
    assert list(overseer.living()) == [3]
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stranger:
        stale = bytearray(file_of(beating, 3).read_bytes())
        stale[8:12] = stranger.pid.to_bytes(4, "little")
        stale[12:16] = (5).to_bytes(4, "little")
        file_of(beating, 5).write_bytes(stale)
        assert is_same_process(stranger.pid, time.time())
        assert not is_same_process(stranger.pid, time.time() - 3600)
        stranger.kill()
    assert list(overseer.living()) == [3], "it has ended"
