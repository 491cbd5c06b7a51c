"""One folder, one run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.cli import main
from shardwise.config import Training
from shardwise.errors import LaunchError
from shardwise.watch.lock import lock_folder, unlock
from shardwise.watch.run_folder import RunFolder

HOLD = """
import os, sys
from pathlib import Path
from shardwise.watch.lock import lock_folder
lock_folder(Path(sys.argv[1]))
child = os.fork()
if child == 0:
    sys.stdin.read()  # a loader worker, which outlives its rank
    os._exit(0)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_run_in_a_folder_is_refused_with_who_holds_it_until_that_one_dies(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout is not None and first.stdout.readline() == "held\n"
        for resume in (True, False):
            with pytest.raises(LaunchError) as refused:
                RunFolder(tmp_path).claim(resume=resume, fresh=not resume, training=Training())
            assert f"is in use by a run that is going on (process {first.pid} on {os.uname().nodename}, since" in str(
                refused.value
            )
            assert "--set run_dir=" in str(refused.value)
        first.kill()
        first.wait()
        folder = RunFolder(tmp_path)
        folder.claim(resume=True, fresh=False, training=Training())
        folder.close()


def test_a_fresh_run_holds_the_new_folder_and_lets_go_of_the_old(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text("{}")
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    folder = RunFolder(run)
    notice = folder.claim(resume=False, fresh=True, training=Training())
    assert notice == f"the earlier run was moved to {tmp_path / 'run-1'}"
    check = "import sys; from pathlib import Path; from shardwise.watch.lock import lock_folder; lock_folder(Path(sys.argv[1]))"
    free, held = (
        subprocess.run(
            [sys.executable, "-c", check, str(each)], capture_output=True, timeout=60, check=False
        ).returncode
        for each in (tmp_path / "run-1", run)
    )
    assert (free, held) == (0, 1)
    assert str(os.getpid()) in (run / ".lock").read_text()
    folder.close()


def test_storage_without_locks_is_no_reason_to_refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno
    import fcntl

    def refuse(*args: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    assert lock_folder(tmp_path) is None
    unlock(None)


def test_a_checkpoint_folder_elsewhere_has_one_run_too_and_is_not_repaired_meanwhile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = tmp_path / "shared"
    (shared / ".writing-step-00000004").mkdir(parents=True)
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(shared)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout is not None and first.stdout.readline() == "held\n"
        folder = RunFolder(tmp_path / "second")
        with pytest.raises(LaunchError, match=f"{shared} is in use by a run"):
            folder.claim(resume=False, fresh=False, training=Training(), checkpoints=shared)
        folder.close()
        assert main(["checkpoint", "repair", str(shared)]) == 2
        assert "is in use by a run that is going on" in capsys.readouterr().err
        first.kill()
    assert (shared / ".writing-step-00000004").is_dir()
