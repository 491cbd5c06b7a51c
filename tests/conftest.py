"""Shared by all tests: one pool of ranks for the whole session, and no process that outlives it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.distributed.pool import FreshRanks, RankPool

# Read when torch is imported, here and in every program that a test starts. Tests run side by side, one per core: with
# threads for every core each, they wait for each other, and a step of a toy takes half a second instead of a millisecond.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Started in the background by a shell, these tests would begin with Ctrl-C ignored, and every program they start as well.
signal.signal(signal.SIGINT, signal.default_int_handler)

REPOSITORY = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def _pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    pool = RankPool(size=4)
    request.session.config.stash[RankPool.key] = pool
    yield pool
    pool.close()


@pytest.fixture
def ranks(_pool: RankPool, tmp_path: Path) -> RankPool:
    """Ranks that are already running: `ranks.run(world_size, function, *args)` returns what each returned."""
    return _pool


@pytest.fixture(scope="session")
def fresh_ranks() -> FreshRanks:
    """Ranks that begin anew for every job."""
    return FreshRanks()


@pytest.fixture(autouse=True)
def no_process_outlives_a_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test ends with the processes it began with, those of the pool aside."""
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    yield
    pool: RankPool | None = request.session.config.stash.get(RankPool.key, None)
    allowed = before | (pool.pids() if pool else set())
    left = [p for p in psutil.Process().children(recursive=True) if p.pid not in allowed and not _helper(p)]
    _, alive = psutil.wait_procs(left, timeout=10)
    assert not alive, f"left behind: {[(p.pid, ' '.join(p.cmdline())[:80]) for p in alive]}"


@pytest.fixture(autouse=True)
def a_clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clean_environment(monkeypatch)
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))


def clean_environment(patch: pytest.MonkeyPatch) -> None:
    """Whoever runs the tests may be a rank of something else."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SHARDWISE_LOG_LEVEL"):
        patch.delenv(name, raising=False)
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        patch.delenv(name)


@pytest.fixture
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Runs write to runs/ in the current folder: make that a temporary one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _helper(process: psutil.Process) -> bool:
    """multiprocessing's own tracker, the processes that ranks and programs are forked from, and those that compile, which end
    with whoever asked them to, are no ranks."""
    try:
        command = " ".join(process.cmdline())
        if "resource_tracker" in command or "compile_worker" in command:
            return True
        return ("forkserver" in command or "tests.cli.server" in command) and process.ppid() == os.getpid()
    except psutil.NoSuchProcess:
        return True


LONG = (
    "test_docs.py",
    "test_benchmarks.py",
    "distributed/test_strategies.py",
    "launch/test_restarts.py",
    "verify/test_planted.py",
    "verify/test_wrong_tasks.py",
    "drill/test_link.py",
    "verify/test_clean.py",
    "drill/test_drill.py",
    "cli/test_train.py",
    "cli/test_next_commands.py",
    "distributed/test_parity.py",
    "distributed/test_parallel_tasks.py",
)
"""Files that take a minute or more. One that is begun last keeps one worker busy, and the others wait for it."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    from tests.quick import is_quick

    for item in items:
        if is_quick(item):
            item.add_marker("quick")
    place = {REPOSITORY / "tests" / name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path, len(place)))
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no GPU"))
