"""Every command that the program prints does, pasted into the same shell, what it says."""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.cli import VERBS, drill
from shardwise.config.commands import RESUME, command, user_command, yaml_text
from shardwise.config.load import load_config
from tests.cli.program import BIN, run_program, shardwise
from tests.cli.test_fetch import CONFIG, Hub, hub
from tests.conftest import REPOSITORY

assert hub  # a fixture

OWN = "task: tests.tasks:Ragged\ntraining: {strategy: single, max_steps: 2, batch_size: 8, eval_at_start: false}\n"


def pasted(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """As a shell takes the line apart."""
    words = shlex.split(line)
    assert words[0] == "shardwise", line
    return shardwise(folder, *words[1:])


def next_commands(said: str) -> dict[str, str]:
    """What is suggested at the end of a run, and the line that does it."""
    lines = said.partition("next:\n")[2].splitlines()
    return {what.strip().rstrip(":"): line.strip() for what, line in zip(lines[::2], lines[1::2], strict=True)}


def metrics(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_what_a_run_suggests_at_its_end_works_for_a_task_of_ones_own_in_folders_with_spaces(tmp_path: Path) -> None:
    (tmp_path / "my configs").mkdir()
    (tmp_path / "my configs" / "own's.yaml").write_text(OWN)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "in-use").touch()
    changes = ["--set", "model.width=8", "--set", "run_dir=my runs/a run"]
    done = shardwise(tmp_path, "train", "my configs/own's.yaml", *changes)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "my runs" / "a run"
    told = next_commands(done.stdout)
    assert len(told) == 3

    exported = run_program(["sh", "-c", told["weights for use elsewhere"]], tmp_path)
    assert exported.returncode == 0, exported.stderr
    assert (tmp_path / "model-2" / "model.safetensors").is_file(), "model was there already, with something in it"

    longer = pasted(told["go on for as long again"], tmp_path)
    assert longer.returncode == 0, longer.stderr
    assert metrics(run)[-1] == 4 and "resumed from" in longer.stdout

    anew = pasted(told["start anew, twice as long; any key can be set so"], tmp_path)
    assert anew.returncode == 0, anew.stderr
    assert metrics(run)[-1] == 4 and "resumed from" not in anew.stdout
    assert (tmp_path / "my runs" / "a run-1" / "run.json").is_file()


def test_a_task_that_comes_with_shardwise_is_exported_without_its_config(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("task: chess\ndata: {num_games: 20, max_plies: 4}\nmodel: {hidden_dim: 16}\n")
    done = shardwise(tmp_path, "train", "a.yaml", "--set", "training.max_steps=1", "--set", "training.num_gpus=1")
    told = next_commands(done.stdout)["weights for use elsewhere"]
    assert told == "shardwise export runs/a --to model"
    assert pasted(told, tmp_path).returncode == 0


@pytest.mark.parametrize(("max_steps", "finished"), [(2, True), (4, False)])
def test_a_folder_that_holds_a_run_is_answered_with_commands_that_go_on_or_start_anew(
    tmp_path: Path, max_steps: int, finished: bool
) -> None:
    """One that is finished would have nothing left to do: it is told how to train on."""
    (tmp_path / "own.yaml").write_text(OWN)
    assert shardwise(tmp_path, "train", "own.yaml").returncode == 0
    (tmp_path / "own.yaml").write_text(OWN.replace("max_steps: 2", f"max_steps: {max_steps}"))
    refused = shardwise(tmp_path, "train", "own.yaml")
    assert refused.returncode == 2
    assert ("it is finished: all of its 2 steps are made" in refused.stderr) is finished
    further, anew = re.findall(r":  (shardwise train .*)", refused.stderr)
    assert pasted(further, tmp_path).returncode == 0
    assert metrics(tmp_path / "runs" / "own")[-1] == 4
    assert pasted(anew, tmp_path).returncode == 0
    assert metrics(tmp_path / "runs" / "own")[-1] == max_steps
    assert metrics(tmp_path / "runs" / "own-1")[-1] == 4


def test_a_finished_run_says_that_nothing_is_left_to_do_and_how_to_go_on(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(OWN)
    assert shardwise(tmp_path, "train", "own.yaml").returncode == 0
    again = shardwise(tmp_path, "train", "own.yaml", "--resume", "auto")
    assert again.returncode == 0
    assert (
        "nothing was left to do: this run has made all of its 2 steps" in again.stdout and "done:" not in again.stdout
    )
    assert pasted(next_commands(again.stdout)["go on for as long again"], tmp_path).returncode == 0
    assert metrics(tmp_path / "runs" / "own")[-1] == 4


def test_a_finished_loop_of_ones_own_says_so_too(tmp_path: Path) -> None:
    loop = [str(BIN / "python"), str(REPOSITORY / "examples" / "own_loop.py")]
    first = run_program(loop, tmp_path)
    assert first.returncode == 0 and first.stderr == ""
    again = run_program(loop, tmp_path)
    assert again.returncode == 0
    assert again.stderr == (
        "nothing is left to do: all 320 steps of this run are made. A larger training.max_epochs (now 20) makes it go on. "
        "To start anew, move runs/own-loop/checkpoints aside\n"
    )
    (tmp_path / "runs/own-loop/checkpoints").rename(tmp_path / "aside")
    assert "step 50 of 320" in run_program(loop, tmp_path).stdout


def test_what_fetch_says_trains_without_internet(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "a b.yaml").write_text(CONFIG.replace("max_seq_len: 64", "max_seq_len: 32"))
    online = {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "home")}
    given = ["a b.yaml", "--set", "training.max_steps=1"]
    refused = shardwise(tmp_path, "config", "show", *given, "--set", "offline=true")
    to_run = refused.stderr.strip().rpartition("run:  ")[2]
    assert to_run == "shardwise fetch 'a b.yaml' --set training.max_steps=1 --set offline=true"
    done = shardwise(tmp_path, *shlex.split(to_run)[1:], "--to", "what, I fetched", **online)
    assert done.returncode == 0, done.stderr
    asked = len(hub.asked)
    trained = pasted(done.stdout.strip().rpartition("internet:  ")[2], tmp_path)
    assert trained.returncode == 0, trained.stderr
    assert "step 1/1" in trained.stdout and len(hub.asked) == asked


def test_what_is_said_of_a_sharded_copy_trains_from_it(tmp_path: Path) -> None:
    (tmp_path / "cells.yaml").write_text(
        "task: cells\ndata: {num_cells: 120, num_genes: 50}\nmodel: {hidden_dim: 16, num_layers: 1, num_heads: 2}\n"
        "training: {strategy: single, max_steps: 1}\n"
    )
    copied = shardwise(tmp_path, "data", "shard", "cells.yaml", "--to", "a, copy", "--set", "training.batch_size=4")
    assert copied.returncode == 0, copied.stderr
    trained = pasted(copied.stdout.strip().rpartition("train from it:  ")[2], tmp_path)
    assert trained.returncode == 0, trained.stderr
    written = load_config(tmp_path / "runs" / "cells" / "config.yaml")
    assert (written.data.source, written.data.paths) == ("shards", ["a, copy"])  # type: ignore[attr-defined]
    assert written.training.batch_size == 4


def test_what_is_said_of_damaged_checkpoints_repairs_them(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(OWN.replace("max_steps: 2", "max_steps: 2, checkpoint_every_n_steps: 1"))
    assert shardwise(tmp_path, "train", "own.yaml", "--set", "run_dir=a run").returncode == 0
    next((tmp_path / "a run" / "checkpoints" / "step-00000002").glob("*.safetensors")).write_bytes(b"")
    found = shardwise(tmp_path, "checkpoint", "verify", "a run")
    assert found.returncode == 1
    repaired = pasted(found.stderr.strip().rpartition(":  ")[2], tmp_path)
    assert repaired.returncode == 0 and "set aside" in repaired.stdout


def test_a_drill_report_names_the_command_that_makes_the_same_drill(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = argparse.ArgumentParser()
    drill.add_arguments(parser)
    words = ["my config.yaml", "--faults", "kill,cut", "--steps", "8", "--report", "r.md", "--set", "name=a b"]
    told = shlex.split(drill._same_again(parser.parse_args(words), 7))
    again = parser.parse_args(told[told.index("drill") + 1 :])
    asked = {**vars(parser.parse_args(words)), "seed": 7, "report": None}
    assert vars(again) == asked


def test_what_is_said_of_waiting_measures_it(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(OWN.replace("strategy: single, ", ""))
    changes = ["--set", "training.num_gpus=2", "--set", "training.fsdp.min_num_params=0"]
    config = load_config(tmp_path / "own.yaml", changes[1::2])
    assert config.source is not None
    words = ["bench", "data", *config.source.words]
    assert words[3:] == changes
    measured = shardwise(tmp_path, *words, "--steps", "1", "--workers", "0")
    assert measured.returncode == 0, measured.stderr


def test_no_message_has_a_command_written_by_hand() -> None:
    """It would lack the quotes, the folder or the overrides. Help texts and comments show how a verb is called in general."""
    by_hand = re.compile(rf"shardwise ({'|'.join(VERBS)})\b[^`]*( --|CONFIG|FOLDER)")
    for file in (REPOSITORY / "src").rglob("*.py"):
        tree = ast.parse(file.read_text())
        general = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        general |= {
            id(node.value) for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg in IN_GENERAL
        }
        for node in ast.walk(tree):
            if isinstance(node, (ast.JoinedStr, ast.Constant)) and id(node) not in general:
                text = ast.unparse(node)
                assert not by_hand.search(text), f"{file.name}, line {node.lineno}: {text}"


IN_GENERAL = {"help", "description", "epilog"}


# ---------------------------------------------------------------- how the program was called


def called(monkeypatch: pytest.MonkeyPatch, argv: list[str], **environ: str) -> str:
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setenv("PATH", f"{BIN}:{os.environ['PATH']}")
    monkeypatch.delitem(sys.modules, "__main__", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    return user_command(RESUME, "auto")


@pytest.mark.parametrize(
    "given",
    [
        ["--resume", "auto"],
        ["--resume=latest"],
        ["--fresh"],
        ["--res", "runs/a b/checkpoints"],
        ["--fre"],
        [],
    ],
)
def test_how_the_run_was_to_begin_is_not_said_again(given: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    argv = [str(BIN / "shardwise"), "train", *given, "a.yaml", "--set", "name=a b"]
    assert called(monkeypatch, argv) == "shardwise train a.yaml --set 'name=a b' --resume auto"


def test_a_program_that_the_shell_does_not_find_is_named_by_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        called(monkeypatch, ["/opt/other/bin/shardwise", "train", "a"])
        == "/opt/other/bin/shardwise train a --resume auto"
    )
    monkeypatch.setattr(sys, "executable", "/opt/with space/python")
    asked = called(monkeypatch, ["/x/shardwise/__main__.py", "train", "a"])
    assert asked == "'/opt/with space/python' -m shardwise train a --resume auto"
    assert command("export", "a b") == "'/opt/with space/python' -m shardwise export 'a b'"


def test_a_loop_of_ones_own_keeps_its_name_and_all_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(BIN / "python"))
    assert called(monkeypatch, ["my loop.py", "--fresh"]) == "python 'my loop.py' --fresh --resume auto"


def test_ranks_of_torchrun_and_srun_are_started_by_them_again(monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ["/x/shardwise/__main__.py", "train", "a.yaml"]
    place = {"RANK": "0", "TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "1"}
    assert called(monkeypatch, argv, **place) == "torchrun --nproc-per-node 4 -m shardwise train a.yaml --resume auto"
    assert called(monkeypatch, ["loop.py"]) == "torchrun --nproc-per-node 4 loop.py --resume auto"
    several = called(monkeypatch, argv, GROUP_WORLD_SIZE="2", MASTER_ADDR="node1")
    machines = "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint node1:29400"
    assert several == f"torchrun --nproc-per-node 4 {machines} -m shardwise train a.yaml --resume auto"
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    by_srun = called(monkeypatch, [str(BIN / "shardwise"), "train", "a.yaml"], SLURM_STEP_ID="0")
    assert by_srun == "srun shardwise train a.yaml --resume auto"


@pytest.mark.parametrize(
    "text", ["fetched", "./a/b-c_d.e", "a b", "a, b", "[x]", "no", "12", "~", "a: b", 'a "b"', "ü", "null"]
)
def test_text_stays_text_in_an_override(text: str) -> None:
    import yaml

    assert yaml.safe_load(f"[{yaml_text(text)}]") == [text]
