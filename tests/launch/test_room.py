"""Where a folder of this machine is full that runs need, a run goes on, or says in one sentence what to free or to set."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from shardwise.errors import NoRoom
from shardwise.launch.environment import attempt
from shardwise.launch.rendezvous import KEEP_ALIVE
from shardwise.launch.scratch import scratch_folder
from shardwise.tasks import Loss
from shardwise.watch.failures import read_failures, record_failure, reserve_room
from tests.cli.program import SHARDWISE, run_program
from tests.cli.test_lost_storage import may_mount
from tests.cli.test_train import curve
from tests.tasks import Ragged

CONFIG = """
task: tests.launch.test_room:{task}
name: ragged
training:
  {{batch_size: 3, max_steps: 6, checkpoint_every_n_steps: 2, log_every_n_steps: 1, eval_at_start: false, num_gpus: {ranks},
   hang_timeout: 20}}
data: {{num_workers: {workers}}}
"""
mounting = pytest.mark.skipif(not may_mount(), reason="only root may mount")
FULL = "head -c 100M /dev/zero > {folder}/fill 2>/dev/null"
FREE = r"has \d\.\d MiB free of \d\.\d MiB"


class Wide(Ragged):
    """Its batches have a megabyte each."""

    def collate(self, samples: list[Tensor]) -> dict[str, Tensor]:
        return {**super().collate(samples), "more": torch.ones(2**20, dtype=torch.uint8)}


class ByDefault(Ragged):
    """Put together by PyTorch's own collate, which writes to shared memory in a worker."""

    def train_data(self) -> list[Tensor]:
        return [torch.nn.functional.pad(each[:8], (0, 2**17)) for each in super().train_data()]

    def collate(self, samples: list[Tensor]) -> dict[str, Tensor]:
        return {
            "ids": torch.utils.data.default_collate([each[:8] for each in samples]),
            "more": torch.utils.data.default_collate(samples),
        }


class Filling(Ragged):
    """In its third step, rank 1 fills the folder for temporary files, and does what the environment says."""

    forwards = 0

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        Filling.forwards += model.training
        if model.training and not attempt() and Filling.forwards == 3 and os.environ.get("RANK") == "1":
            subprocess.run(FULL.format(folder=os.environ["TMPDIR"]), shell=True, check=False)
            time.sleep(1.5 * KEEP_ALIVE.total_seconds())  # the launcher writes down that it is alive
            if os.environ["THEN"] == "raise":
                raise ValueError("the cause")
            if os.environ["THEN"] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch)


def train(
    folder: Path, mounts: str, task: str = "Wide", *, ranks: int, workers: int = 0, **variables: str
) -> subprocess.CompletedProcess[str]:
    (folder / "ragged.yaml").write_text(CONFIG.format(task=task, ranks=ranks, workers=workers))
    command = f"{mounts}; exec {SHARDWISE} train ragged.yaml"
    done = run_program(["unshare", "-m", "sh", "-c", command], folder, **variables)
    assert "Traceback" not in done.stderr + done.stdout, done.stderr
    return done


def shared_memory(size: str, *, full: bool = False) -> str:
    mount = f"mount -t tmpfs -o size={size} tmpfs /dev/shm"
    return f"{mount}; {FULL.format(folder='/dev/shm')}" if full else mount


# ---------------------------------------------------------------- the folder for temporary files


@mounting
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_full_folder_for_temporary_files_is_left_for_another(tmp_path: Path, ranks: int) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounts = f"mount -t tmpfs -o size=64k tmpfs {small}; {FULL.format(folder=small)}"
    done = train(tmp_path, mounts, ranks=ranks, TMPDIR=str(small))
    assert done.returncode == 0, done.stderr
    assert len(curve(tmp_path)) == 6


@mounting
def test_one_with_too_little_room_is_named_before_any_rank_starts(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    done = train(tmp_path, f"mount -t tmpfs -o size=300k tmpfs {small}", ranks=2, TMPDIR=str(small))
    assert done.returncode == 2
    assert done.stderr == (
        "error: there is no room for temporary files (No space left on device; 1 MiB is needed): "
        f"{small} has 0.3 MiB free of 0.3 MiB. Free some there, or name a folder that has room with TMPDIR=…\n"
    )
    assert not (tmp_path / "runs").exists()


@mounting
def test_a_single_process_goes_on_there_unwatched(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    done = train(tmp_path, f"mount -t tmpfs -o size=12k tmpfs {small}", ranks=1, TMPDIR=str(small))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("a hang is not noticed: there is no room for temporary files") == 1
    assert len(curve(tmp_path)) == 6


@mounting
@pytest.mark.parametrize("then", ["go on", "raise", "kill"])
def test_one_that_fills_up_during_a_run_costs_neither_the_run_nor_its_words(tmp_path: Path, then: str) -> None:
    small = tmp_path / "small"
    small.mkdir()
    done = train(tmp_path, f"mount -t tmpfs -o size=3m tmpfs {small}", "Filling", ranks=2, TMPDIR=str(small), THEN=then)
    if then == "raise":
        assert done.returncode == 0 and ": ValueError: the cause" in done.stderr
    elif then == "kill":
        assert done.returncode == 0 and "rank 1 was killed by SIGKILL in step 3" in done.stderr
    assert done.returncode == 0, done.stderr
    assert [step for step, *_ in curve(tmp_path)] == [1, 2, 3, 4, 5, 6]


def test_where_none_can_be_written_to_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    with pytest.raises(NoRoom) as said, scratch_folder():
        pass
    assert str(said.value) == (
        "there is no room for temporary files: No usable temporary directory found in ['/tmp']. Free some there, or name a "
        "folder that has room with TMPDIR=…"
    )


def test_an_error_of_the_body_is_not_taken_for_want_of_room() -> None:
    with pytest.raises(OSError, match="of the body"), scratch_folder():
        raise OSError("of the body")


def test_room_is_kept_for_the_words_of_a_rank_that_fails(tmp_path: Path) -> None:
    reserve_room(tmp_path, 1)
    assert [file.stat().st_size for file in tmp_path.iterdir()] == [2**16]
    record_failure(ValueError("the cause"), tmp_path, 1)
    assert [file.name for file in tmp_path.iterdir()] == ["error-1.json"]
    assert read_failures(tmp_path)[1].message == "ValueError: the cause"


# ---------------------------------------------------------------- shared memory


@mounting
def test_without_workers_a_single_process_needs_no_shared_memory(tmp_path: Path) -> None:
    done = train(tmp_path, shared_memory("64k", full=True), ranks=1)
    assert done.returncode == 0, done.stderr
    assert len(curve(tmp_path)) == 6


@mounting
@pytest.mark.parametrize(
    ("ranks", "workers", "what"), [(2, 0, "what the ranks are started with"), (1, 2, "2 loader worker(s)")]
)
def test_full_shared_memory_is_named_with_what_gives_it_more(
    tmp_path: Path, ranks: int, workers: int, what: str
) -> None:
    done = train(tmp_path, shared_memory("64k", full=True), ranks=ranks, workers=workers)
    assert done.returncode == 2
    more = r"Give it more \(docker run --shm-size=8g; as root: mount -o remount,size=8g /dev/shm\)"
    instead = ", or read without workers: data.num_workers: 0" if workers else ""
    assert re.fullmatch(
        rf"error: there is no room for {re.escape(what)}: /dev/shm {FREE}\. {more}{instead}\n", done.stderr
    )


@mounting
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_has_no_room_in_shared_memory_comes_through_a_pipe(tmp_path: Path, ranks: int) -> None:
    (tmp_path / "whole").mkdir()
    whole = train(tmp_path / "whole", "true", ranks=ranks, workers=2)
    assert whole.returncode == 0 and "through a pipe" not in whole.stdout
    done = train(tmp_path, shared_memory("1500k"), ranks=ranks, workers=2)
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"warning: batches of loader workers come through a pipe, which is slower, because shared memory cannot take them: "
        rf"No space left on device( \(28\))?; /dev/shm {FREE}\. Give it more .*, or lower data.num_workers or",
        done.stdout,
    )
    assert curve(tmp_path) == curve(tmp_path / "whole")


@mounting
def test_pytorchs_own_collate_without_room_is_answered(tmp_path: Path) -> None:
    done = train(tmp_path, shared_memory("300k"), "ByDefault", ranks=1, workers=1)
    assert done.returncode == 2
    assert re.fullmatch(
        rf"error: there is no room for what a loader worker has read: /dev/shm {FREE}\. Give it more .*, or lower "
        r"data.num_workers or data.prefetch_factor, or read without workers: data.num_workers: 0\n",
        done.stderr,
    )
