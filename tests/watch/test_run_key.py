"""The key by which the ranks of a run know each other."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import pytest

from shardwise.errors import LaunchError
from shardwise.watch.run_key import NAME, new_key, run_key


def test_the_first_to_come_makes_it_for_its_user_alone_and_the_others_find_it(tmp_path: Path) -> None:
    keys: list[bytes] = []
    threads = [threading.Thread(target=lambda: keys.append(run_key(tmp_path / "run"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(keys) == 8 and len(set(keys)) == 1 and len(keys[0]) == 64
    assert (tmp_path / "run" / NAME).stat().st_mode & 0o777 == 0o600
    assert run_key(tmp_path / "other") != keys[0]


def test_one_that_is_given_counts_before_the_folder_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "key"
    file.write_text("given in a file 1\n")
    file.chmod(0o600)
    monkeypatch.setenv("SHARDWISE_KEY_FILE", str(file))
    assert run_key(tmp_path / "run") == b"given in a file 1"
    monkeypatch.setenv("SHARDWISE_KEY", "given as a value")
    assert run_key(tmp_path / "run") == b"given as a value"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("given", ["short", "", " "])
def test_one_that_is_too_short_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    file = tmp_path / "key"
    file.write_text(given)
    monkeypatch.setenv("SHARDWISE_KEY_FILE", str(file))
    with pytest.raises(LaunchError, match=r"needs 16 at the least"):
        run_key(tmp_path)


def test_a_link_a_pipe_and_a_missing_file_are_errors_for_a_person(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real").write_text(new_key())
    (tmp_path / "link").symlink_to(tmp_path / "real")
    os.mkfifo(tmp_path / "pipe")
    for name, said in (("link", "cannot be read"), ("pipe", "is no file"), ("absent", "cannot be read")):
        monkeypatch.setenv("SHARDWISE_KEY_FILE", str(tmp_path / name))
        with pytest.raises(LaunchError, match=said):
            run_key(tmp_path)


def test_one_that_others_can_read_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    key = run_key(tmp_path)
    (tmp_path / NAME).chmod(0o644)
    with caplog.at_level(logging.WARNING):
        assert run_key(tmp_path) == key
    assert "can be read by others" in caplog.text and "chmod 600" in caplog.text


def test_a_folder_that_cannot_be_written_is_an_error_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LaunchError, match="SHARDWISE_KEY_FILE"):
        run_key(tmp_path / "file" / "run")
