"""What verify unpickles is of this user alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardwise.verify.shared_data import is_own


def test_a_task_is_taken_over_only_from_a_folder_that_nobody_else_can_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "shardwise-verify"
    folder.mkdir(mode=0o700)
    (folder / "task.pickle").touch()
    assert is_own(folder / "task.pickle")
    folder.chmod(0o770)
    assert not is_own(folder / "task.pickle")
    folder.chmod(0o700)
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    assert not is_own(folder / "task.pickle")
