"""`shardwise train` as a user meets it: whole processes, signals, failures, other launchers."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cli.program import BIN, SHARDWISE, Program, environment, run_anew, run_program, shardwise, start, started

RAGGED = """
task: tests.tasks:{task}
name: ragged
training: {{batch_size: 3, max_epochs: {epochs}, checkpoint_every_n_steps: 2, log_every_n_steps: 1, optimizer: {{lr: 0.01}}}}
"""


def write(folder: Path, task: str = "Ragged", epochs: int = 1) -> None:
    (folder / "ragged.yaml").write_text(RAGGED.format(task=task, epochs=epochs))


def curve(folder: Path) -> list[tuple[int, float, float, float]]:
    lines = [json.loads(line) for line in (folder / "runs/ragged/metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"], line["grad_norm"], line["lr"]) for line in lines if "eval" not in line]


PAIRS = """
task: tests.gathering:{task}
name: pairs
training: {{batch_size: 3, gradient_accumulation: {accumulation}, max_steps: 2, num_gpus: {ranks}}}
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loss_that_is_no_sum_and_accumulated_is_told_before_the_ranks_start(tmp_path: Path, ranks: int) -> None:
    (tmp_path / "pairs.yaml").write_text(PAIRS.format(task="Apart", accumulation=2, ranks=ranks))
    done = shardwise(tmp_path, "train", "pairs.yaml")
    assert done.returncode == 0, done.stderr
    told = "(loss_is_a_sum = False), and each step has 2 micro-batches. Each of them gets a loss of its own"
    assert done.stderr.count(told) == 1, done.stderr
    (tmp_path / "pairs.yaml").write_text(PAIRS.format(task="Apart", accumulation=1, ranks=ranks))
    assert "loss_is_a_sum" not in shardwise(tmp_path, "train", "pairs.yaml", "--fresh").stderr


def test_torchrun_tells_once_of_a_loss_that_is_no_sum_and_accumulated(tmp_path: Path) -> None:
    (tmp_path / "pairs.yaml").write_text(PAIRS.format(task="Apart", accumulation=2, ranks=2))
    command = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2", SHARDWISE, "train", "pairs.yaml"]
    done = run_program(command, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("(loss_is_a_sum = False)") == 1, done.stderr


def test_a_loss_that_gathers_and_is_accumulated_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "pairs.yaml").write_text(PAIRS.format(task="Contrast", accumulation=2, ranks=2))
    done = shardwise(tmp_path, "train", "pairs.yaml")
    assert done.returncode == 2
    assert done.stderr.count("error: gather_batch does not go with gradient accumulation, here over 2") == 1
    assert "Traceback" not in done.stderr


def checksums(folder: Path) -> dict[str, Any]:
    """Of the last checkpoint's files: the weights, to the bit."""
    last = sorted((folder / "runs/ragged/checkpoints").glob("step-*"))[-1]
    files = json.loads((last / "manifest.json").read_text())["files"]
    return {name: entry for name, entry in files.items() if name.endswith(".safetensors")}


def test_killed_by_sigkill_and_resumed_it_is_bit_for_bit_the_uninterrupted_run(tmp_path: Path) -> None:
    """Before the first checkpoint, between two of them, and in the last step; the tests of resume try every step.

    Checkpoints are in place before training goes on: otherwise it would be chance from which one it resumes.
    """
    whole = tmp_path / "whole"
    whole.mkdir()
    write(whole, "Deadly", epochs=2)
    assert shardwise(whole, "train", "ragged.yaml").returncode == 0
    for rank, step, resumed_at in ((0, 2, 0), (1, 8, 6), (1, 18, 16)):
        killed = tmp_path / f"killed-{step}"
        killed.mkdir()
        write(killed, "Deadly", epochs=2)
        at_once = ("--set", "training.async_checkpoint=false", "--max-restarts", "0")
        died = shardwise(killed, "train", "ragged.yaml", *at_once, KILL_AT=f"{rank}:{step}")
        assert died.returncode == 2
        assert f"error: rank {rank} was killed by SIGKILL" in died.stderr
        assert "Traceback" not in died.stderr
        assert [done for done, *_ in curve(killed)][-1] == step - 1
        told = died.stderr.rpartition("Go on from the last checkpoint:  ")[2].strip()
        assert told.startswith("shardwise train ragged.yaml ") and told.endswith(" --resume auto")
        resumed = shardwise(killed, *shlex.split(told)[1:])
        assert resumed.returncode == 0
        assert f"at step {resumed_at}\n" in resumed.stdout or resumed_at == 0
        assert curve(killed) == curve(whole)
        assert checksums(killed) == checksums(whole)


def test_a_rank_that_fails_ends_the_others_and_its_error_is_the_one_shown(tmp_path: Path) -> None:
    write(tmp_path, "Broken")
    done = shardwise(tmp_path, "train", "ragged.yaml")
    assert done.returncode == 2
    assert "error: rank 1 failed:" in done.stderr and "ValueError: the cause" in done.stderr
    assert "restart 1 of 3" in done.stderr and "restart 2" not in done.stderr, "the same again would come to the same"
    assert "the same error as before the restart: not started again" in done.stderr
    assert "Connection closed by peer" not in done.stderr
    assert done.stderr.count("Traceback") == 1


@pytest.mark.parametrize(("ranks", "how"), [(1, ""), (2, ""), (2, "kill")])
def test_a_first_evaluation_that_fails_does_not_block_the_folder(tmp_path: Path, ranks: int, how: str) -> None:
    write(tmp_path, "Unevaluated")
    (tmp_path / "broken").write_text(how)
    command = ["train", "ragged.yaml", "--set", f"training.num_gpus={ranks}", "--max-restarts", "0"]
    failed = shardwise(tmp_path, *command)
    assert failed.returncode != 0
    run = tmp_path / "runs" / "ragged"
    logs = {file: file.read_text() for file in run.glob("ranks/*.log")}
    assert len(logs) == ranks - 1 and all("about to fail" in said for said in logs.values())
    (tmp_path / "broken").unlink()
    done = shardwise(tmp_path, *command)
    assert done.returncode == 0, done.stderr
    assert "the start that lies in runs/ragged came to no step: this run takes its place" in done.stdout
    assert ("what its ranks said stays in runs/ragged/ranks" in done.stdout) is (ranks > 1)
    assert all(file.read_text().startswith(said) for file, said in logs.items())
    assert [each.name for each in (tmp_path / "runs").iterdir()] == ["ragged"]
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics if "eval" in line] == [0, metrics[-1]["step"]]
    refused = shardwise(tmp_path, *command)
    assert refused.returncode == 2 and "already holds a run" in refused.stderr


def test_a_rank_that_runs_out_of_memory_ends_the_job_with_what_filled_it(tmp_path: Path) -> None:
    write(tmp_path, "Hungry")
    done = shardwise(tmp_path, "train", "ragged.yaml")
    assert done.returncode != 0
    assert "step 3, rank 1: out of memory: 1.07e+09 GiB were asked for" in done.stderr
    assert "held: weights" in done.stderr and "what to do, in this order" in done.stderr
    assert "training.batch_size: 1 (training.gradient_accumulation: 3 keeps the numbers the same)" in done.stderr
    assert "Traceback" not in done.stderr and "Connection" not in done.stderr


def test_an_error_for_a_person_comes_without_a_traceback(tmp_path: Path) -> None:
    write(tmp_path)
    done = run_anew(tmp_path, "train", "ragged.yaml", "--set", "data.samples=0")
    assert done.returncode == 2 and done.stderr == "error: --set: data.samples: 0 is not allowed. Allowed: 1 or more\n"
    done = run_anew(tmp_path, "train", "ragged.yaml", "--resume", "latest")
    assert done.returncode == 2
    assert done.stderr == "error: --resume latest: there is no whole checkpoint in runs/ragged/checkpoints\n"


@contextmanager
def running(folder: Path, *arguments: str) -> Iterator[tuple[Program, Callable[[str], None]]]:
    """The program, and a way to wait for a line of it."""
    process = started([SHARDWISE, *arguments], folder)
    seen: list[str] = []

    def wait_for(text: str) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            seen.append(line)
            if text in line:
                return
        raise AssertionError(f"{text!r} never came:\n{''.join(seen)}")

    try:
        yield process, wait_for
    finally:
        if process.poll() is None:
            process.kill()
        assert process.stdout is not None
        process.stdout.close()
        process.wait()


@pytest.mark.parametrize(
    ("ranks", "number", "code"),
    [(1, signal.SIGINT, 130), (2, signal.SIGINT, 130), (2, signal.SIGTERM, 75), (2, signal.SIGUSR1, 75)],
)
def test_a_signal_ends_all_ranks_with_a_checkpoint_and_leaves_no_process(
    tmp_path: Path, ranks: int, number: int, code: int
) -> None:
    """75 says: run me again."""
    write(tmp_path, "Slow", epochs=50)
    with running(tmp_path, "train", "ragged.yaml", "--set", f"training.num_gpus={ranks}") as (process, wait_for):
        wait_for(" 3/")
        family = psutil.Process(process.pid).children(recursive=True)
        if number == signal.SIGTERM:
            process.send_signal(number)  # a scheduler may send it to the launcher alone,
        else:
            os.killpg(process.pid, number)  # and, as a terminal does, to every process of the job
        wait_for("Go on with:  shardwise train ragged.yaml")
        assert process.wait(timeout=30) == code
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive
    done = shardwise(tmp_path, "train", "ragged.yaml", "--resume", "latest", "--set", "training.max_epochs=1", "--set",
                     f"training.num_gpus={ranks}")  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_a_second_ctrl_c_ends_a_long_step_at_once(tmp_path: Path) -> None:
    write(tmp_path, "Endless")
    with running(tmp_path, "train", "ragged.yaml") as (process, wait_for):
        wait_for("in an endless step")
        family = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)
        wait_for("stopping before the next step; Ctrl-C again to stop at once")
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=20) == 130
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive


def test_a_mean_in_place_of_a_sum_ends_the_job_once_with_the_line_to_write(tmp_path: Path) -> None:
    text = RAGGED.format(task="", epochs=1).replace("tests.tasks:", "tests.distributed.test_loss_check:Mean")
    (tmp_path / "ragged.yaml").write_text(text)
    for ranks in ("1", "2"):
        ended = shardwise(tmp_path, "train", "ragged.yaml", "--fresh", "--set", f"training.num_gpus={ranks}")
        assert ended.returncode == 2 and "Traceback" not in ended.stderr
        assert ended.stderr.count("error: step 1: the loss (Mean.loss, test_loss_check.py:") == 1
        assert "\n      return Loss(sum=loss * count, count=count)\n" in ended.stderr


def test_a_task_that_exits_is_named(tmp_path: Path) -> None:
    write(tmp_path, "Exits")
    done = shardwise(tmp_path, "train", "ragged.yaml")
    assert done.returncode == 2
    assert "the task called sys.exit(0) during the run" in done.stderr


def test_ranks_do_not_outlive_a_launcher_that_is_killed(tmp_path: Path) -> None:
    write(tmp_path, "Slow", epochs=50)
    with running(tmp_path, "train", "ragged.yaml") as (process, wait_for):
        wait_for(" 2/")
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 2
        process.kill()
        _, alive = psutil.wait_procs(family, timeout=10)
        assert not alive


def test_under_torchrun_the_numbers_are_the_same(tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "torchrun"
    for folder in (own, other):
        folder.mkdir()
        write(folder)
    assert shardwise(own, "train", "ragged.yaml").returncode == 0
    command = [str(BIN / "torchrun"), "--nproc-per-node", "2", "-m", "shardwise", "train", "ragged.yaml"]
    done = run_program(command, other)
    assert done.returncode == 0, done.stderr
    assert curve(other) == curve(own)
    bad = run_program([*command, "--resume", "nowhere"], other)
    assert bad.returncode != 0
    assert "[rank 0] error: there is no checkpoint nowhere" in bad.stderr


def test_under_srun_slurms_variables_are_read(tmp_path: Path) -> None:
    """Two processes with the variables that srun sets, as seen under Slurm 22.05."""
    write(tmp_path)
    tasks = [
        start(
            [SHARDWISE, "train", "ragged.yaml"],
            tmp_path,
            environment(
                SLURM_JOB_ID=str(os.getpid()),
                SLURM_STEP_ID="0",
                SLURM_PROCID=str(task),
                SLURM_LOCALID=str(task),
                SLURM_NTASKS="2",
                SLURM_STEP_NUM_TASKS="2",
                SLURM_JOB_NODELIST="localhost",
                SLURM_STEP_NODELIST="localhost",
            ),
        )
        for task in range(2)
    ]
    outputs = [task.communicate(timeout=120) for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], outputs
    assert json.loads((tmp_path / "runs/ragged/run.json").read_text())["world"] == 2
    assert outputs[1][0] == "", "only rank 0 speaks"


def test_a_terminal_gets_one_live_line_that_is_replaced(tmp_path: Path) -> None:
    write(tmp_path, "Slow")
    master, slave = os.openpty()
    command = [
        SHARDWISE,
        "train",
        "ragged.yaml",
        "--set",
        "training.log_every_n_steps=5",
        "--set",
        "training.num_gpus=1",
    ]
    process = start(command, tmp_path, environment(), stdout=slave, stderr=slave)
    os.close(slave)
    output = b""
    while True:
        try:
            chunk = os.read(master, 4096)
        except OSError:  # the terminal is closed when the program ends
            break
        if not chunk:
            break
        output += chunk
    os.close(master)
    assert process.wait(timeout=60) == 0
    text = output.decode()
    assert "\r\x1b[K" in text, "the live line is taken back before the next"
    assert "step  3/18" in text and "step  3/18" not in (tmp_path / "runs/ragged/metrics.jsonl").read_text()


def test_more_ranks_than_gpus_and_several_machines_are_answered(tmp_path: Path) -> None:
    write(tmp_path)
    done = shardwise(
        tmp_path, "train", "ragged.yaml", "--set", "training.device=cuda", "--set", "training.num_gpus=1000"
    )
    assert done.returncode == 2 and "training.num_gpus: 1000, but this machine has" in done.stderr
    done = shardwise(tmp_path, "train", "ragged.yaml", "--set", "training.num_gpus=4", "--set", "training.num_nodes=2")
    assert done.returncode == 2 and "torchrun --nnodes 2" in done.stderr
    done = shardwise(tmp_path, "train", "ragged.yaml", "--resume", "auto", "--fresh")
    assert done.returncode == 2 and "give one of them" in done.stderr


def test_a_missing_extra_is_one_line_that_says_what_to_install(tmp_path: Path) -> None:
    """As on a machine where only the core is installed: the import of the extra's package fails."""
    write(tmp_path)
    (tmp_path / "chess.yaml").write_text("task: chess\n")
    hide = (
        "import sys\n"
        "for name in ('transformers', 'chess', 'wandb'): sys.modules[name] = None\n"
        "from shardwise.cli import main\nsys.exit(main(sys.argv[1:]))"
    )
    track = "training.logger: wandb needs the package 'wandb': pip install 'shardwise[track]'"
    lm = "task: chess needs the package 'chess': pip install 'shardwise[lm]'"
    for arguments, message in [
        (["train", "ragged.yaml", "--set", "training.logger=wandb"], track),
        (["train", "chess.yaml"], lm),
    ]:
        done = run_program([sys.executable, "-c", hide, *arguments], tmp_path)
        assert done.returncode == 2 and done.stderr == f"error: {message}\n"


def test_waiting_is_not_needed_for_help(tmp_path: Path) -> None:
    """Neither torch nor transformers is imported before a verb needs it."""
    check = (
        "import sys\n"
        "from shardwise.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'pydantic', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    done = run_program([sys.executable, "-c", check], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "The first thing to try" in done.stdout
