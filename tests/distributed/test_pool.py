"""The pool of ranks itself: one that dies is told of, and later tests do not suffer from it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.distributed.pool import RankDied, RankPool


def _die(number: int) -> None:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), number)


def _die_once(number: int, mark: str) -> str:
    if os.environ["RANK"] == "0" and not Path(mark).exists():
        Path(mark).touch()
        os.kill(os.getpid(), number)
    return os.environ["RANK"]


def _own_rank() -> str:
    return os.environ["RANK"]


def test_a_rank_that_dies_fails_its_test_and_no_other(ranks: RankPool) -> None:
    with pytest.raises(RankDied, match="rank 1 died with exit code -9"):
        ranks.run(2, _die, signal.SIGKILL)
    assert ranks.run(2, _own_rank) == ["0", "1"]


def test_after_a_segmentation_fault_it_is_run_once_more_and_that_is_told(ranks: RankPool, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="rank 0 died with exit code -11"):
        assert ranks.run(2, _die_once, signal.SIGSEGV, str(tmp_path / "mark")) == ["0", "1"]
    with pytest.warns(UserWarning), pytest.raises(RankDied):
        ranks.run(2, _die, signal.SIGSEGV)
    assert ranks.run(2, _own_rank) == ["0", "1"]
