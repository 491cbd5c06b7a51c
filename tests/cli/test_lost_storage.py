"""Storage that goes away under a run ends it at the next checkpoint, in a sentence that says what happened."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from torch import Tensor, nn

from shardwise.launch.environment import attempt
from shardwise.tasks import Loss
from tests.cli.program import SHARDWISE, run_program, shardwise
from tests.tasks import Ragged

CONFIG = """
task: tests.cli.test_lost_storage:Losing
name: ragged
training:
  {batch_size: 3, max_steps: 8, checkpoint_every_n_steps: 2, log_every_n_steps: 1, eval_at_start: false, num_gpus: 1,
   hang_timeout: 20}
"""


class Losing(Ragged):
    """In the fourth step, rank 0 does what the environment says to a folder."""

    forwards = 0

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        Losing.forwards += model.training
        if model.training and not attempt() and Losing.forwards == 4 and os.environ.get("RANK", "0") == "0":
            what, _, name = os.environ["LOSE"].partition(":")
            folder = Path(name)
            if what == "unmount":
                subprocess.run(["umount", "-l", name], check=True)
            elif what == "moved":
                folder.rename(folder.with_name("moved"))
            else:  # a checkpoint may be being written there
                shutil.rmtree(folder.rename(folder.with_name("trash")), ignore_errors=True)
            if what == "replaced":
                folder.mkdir()
            if os.environ.get("THEN_KILL"):
                os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch)


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "ragged.yaml").write_text(CONFIG)
    return tmp_path


ENDS = ". Whatever the run does from here on would be lost: it ends. Bring the folder back to where it was, and go on"


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("lost", ["deleted", "moved", "replaced"])
def test_a_run_folder_that_is_deleted_moved_or_replaced_ends_the_run(work: Path, lost: str, ranks: int) -> None:
    done = shardwise(work, "train", "ragged.yaml", "--set", f"training.num_gpus={ranks}", LOSE=f"{lost}:runs/ragged")
    happened = {
        "deleted": "was deleted while the run was going on",
        "moved": f"was moved to {work}/runs/moved while the run was going on",
        "replaced": "was deleted while the run was going on, and another folder is in its place",
    }[lost]
    assert done.returncode == 2, done.stdout
    assert f"error: the run folder runs/ragged {happened}{ENDS}" in done.stderr
    assert "Traceback" not in done.stderr and "restart " not in done.stderr
    assert "metrics.jsonl is not written here any more. The next checkpoint ends the run" in done.stdout
    left = {"deleted": [], "moved": [], "replaced": ["ragged"]}[lost]
    assert [path.name for path in (work / "runs").iterdir() if path.name not in ("moved", "trash")] == left, (
        "it is not made anew"
    )
    assert not list((work / "runs").glob("ragged/*"))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("wait", ["true", "false"])
def test_so_does_a_checkpoint_folder_wherever_it_is(work: Path, ranks: int, wait: str) -> None:
    for where, options in (
        ("runs/ragged/checkpoints", ["run_dir=runs/ragged"]),
        ("big/disk", ["run_dir=runs/other", "training.checkpoint_dir=big/disk"]),
    ):
        options += [f"training.num_gpus={ranks}", f"training.async_checkpoint={wait}"]
        sets = [word for option in options for word in ("--set", option)]
        done = shardwise(work, "train", "ragged.yaml", *sets, LOSE=f"deleted:{where}")
        assert done.returncode == 2, done.stdout
        assert f"error: the checkpoint folder {where} was deleted while the run was going on{ENDS}" in done.stderr
        assert "Traceback" not in done.stderr and not (work / where).exists()


def test_the_last_checkpoint_of_a_run_is_no_success_either(work: Path) -> None:
    once = ("--set", "training.checkpoint_every_n_steps=100", "--set", "training.max_steps=4")
    done = shardwise(work, "train", "ragged.yaml", *once, LOSE="deleted:runs/ragged")
    assert done.returncode == 2 and f"was deleted while the run was going on{ENDS}" in done.stderr
    assert not (work / "runs" / "ragged").exists()


def test_ranks_that_die_as_well_are_not_started_again_from_zero(work: Path) -> None:
    for lost in ("deleted", "moved"):
        done = shardwise(
            work, "train", "ragged.yaml", "--set", "training.num_gpus=2", LOSE=f"{lost}:runs/ragged", THEN_KILL="1"
        )
        assert done.returncode == 2 and "restart " not in done.stderr
        assert "error: rank 0 was killed by SIGKILL" in done.stderr
        assert "and the run folder runs/ragged " in done.stderr
        assert "Bring it back to where it was, and go on with --resume auto" in done.stderr
        assert not (work / "runs" / "ragged").exists()


def may_mount() -> bool:
    command = ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return (
        shutil.which("unshare") is not None
        and subprocess.run(command, capture_output=True, check=False).returncode == 0
    )


@pytest.mark.skipif(not may_mount(), reason="only root may mount")
@pytest.mark.parametrize(
    ("mounted", "folder"), [("disk", "disk"), ("disk", "disk/run"), ("runs/ragged/checkpoints", "runs/ragged")]
)
def test_storage_that_is_unmounted_ends_the_run(work: Path, mounted: str, folder: str) -> None:
    (work / mounted).mkdir(parents=True)
    train = f"mount -t tmpfs tmpfs {mounted} && exec {SHARDWISE} train ragged.yaml --set run_dir={folder}"
    done = run_program(["unshare", "-m", "sh", "-c", train], work, LOSE=f"unmount:{mounted}")
    assert done.returncode == 2, done.stdout + done.stderr
    gone = (
        "is gone. Was its storage unmounted?"
        if folder == "disk/run"
        else "is not the one that the run began in: another is in its"
    )
    what = f"checkpoint folder {mounted}" if folder == "runs/ragged" else f"run folder {folder}"
    assert f"error: the {what} {gone}" in done.stderr and "Traceback" not in done.stderr
    assert not list((work / mounted).iterdir()), "nothing is written below the mount"
