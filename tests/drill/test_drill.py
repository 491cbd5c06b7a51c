"""`shardwise drill`: a dozen faults are survived, what is lost is found, and the same seed makes the same ones."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli import main
from shardwise.drill.compare import differences
from shardwise.drill.conduct import Recovery, Result
from shardwise.drill.faults import Fault, Kind, schedule
from shardwise.drill.report import as_data, as_table, as_words
from tests.cli.program import shardwise

CONFIG = """
task: tests.tasks:{task}
name: toy
training:
  {{strategy: ddp, batch_size: 3, max_epochs: 50, eval_at_start: false, optimizer: {{lr: 0.01}}, checkpoint_dir: real}}
"""


def drill(folder: Path, task: str, *arguments: str) -> tuple[int, dict[str, Any], str]:
    (folder / "toy.yaml").write_text(CONFIG.format(task=task))
    done = shardwise(folder, "drill", "toy.yaml", "--json", *arguments)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout), done.stderr


def test_a_dozen_faults_of_all_kinds_on_one_machine_lose_nothing(tmp_path: Path) -> None:
    kinds = [kind for kind in Kind if not kind.needs_two_machines]
    code, result, said = drill(tmp_path, "Ragged", "--count", "12", "--seed", "1", "--faults", ",".join(kinds))
    assert (code, result["problems"]) == (0, []), said
    assert {each["fault"]["kind"] for each in result["recoveries"]} == set(kinds)
    by_kind = {each["fault"]["kind"]: each for each in result["recoveries"]}
    paused, hung = by_kind["pause"], by_kind["hang"]
    assert f"rank {paused['fault']['rank']} was stopped by a signal" in paused["verdict"]
    assert hung["verdict"].startswith(f"rank {hung['fault']['rank']} is in ")
    output = "".join(file.read_text() for file in tmp_path.glob("runs/toy-drill/round-*/output.txt"))
    assert output.count("No space left on device; training goes on") == 1
    damaged = [path.name for path in tmp_path.glob("runs/toy-drill/round-*/run/checkpoints/damaged-*")]
    assert len(damaged) == 2, "one was cut, in one a bit was flipped"
    assert not (tmp_path / "real").exists(), "the checkpoints of a real run are not touched"


def test_a_task_that_remembers_what_no_checkpoint_has_is_found_out(tmp_path: Path) -> None:
    """Otherwise a drill could not fail."""
    code, result, said = drill(
        tmp_path, "Forgetful", "--count", "1", "--faults", "kill", "--seed", "3", "--steps", "12"
    )
    assert code == 1, said
    assert any("weights or moments differ at the end" in problem for problem in result["problems"])
    assert any("metrics differ, first at step" in problem for problem in result["problems"])


# ---------------------------------------------------------------- the schedule


def test_the_schedule_follows_from_the_seed_and_has_every_kind_equally_often() -> None:
    many = 5 * len(Kind)
    faults = schedule(5, many, list(Kind), world=4, saved_every=2)
    assert faults == schedule(5, many, list(Kind), world=4, saved_every=2)
    assert faults != schedule(6, many, list(Kind), world=4, saved_every=2)
    assert set(Counter(fault.kind for fault in faults).values()) == {5}
    assert {fault.rank for fault in faults} == {0, 1, 2, 3}
    assert {fault.steps for fault in faults} == {1, 2, 3, 4}
    assert [fault.number for fault in faults] == list(range(many))
    assert [fault.kind for fault in faults[-5:]] == [Kind.LINK] * 5, "in runs of their own, after the others"


def test_wrong_input_is_answered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "toy.yaml").write_text(CONFIG.format(task="Ragged"))
    config = str(tmp_path / "toy.yaml")
    assert main(["drill", config, "--faults", "kill,earthquake"]) == 2
    assert "--faults: earthquake: there is kill, pause" in capsys.readouterr().err
    assert main(["drill", config, "--count", "0"]) == 2
    assert "--count, --ranks and --steps: at least 1" in capsys.readouterr().err
    (tmp_path / "mine").mkdir()
    assert main(["drill", config, "--folder", str(tmp_path / "mine")]) == 2
    assert "no earlier drill made it" in capsys.readouterr().err
    assert main(["drill", config, "--faults", "list"]) == 0
    assert "SIGKILL of the launcher" in capsys.readouterr().out


# ---------------------------------------------------------------- what counts as lost


def made(step: int, rank: int, ids: list[int], epoch: int = 0) -> dict[str, Any]:
    return {"what": "stepped", "step": step, "rank": rank, "ids": ids, "epoch": epoch}


def test_a_step_counts_as_it_was_made_the_last_time(tmp_path: Path) -> None:
    whole = [made(1, 0, [4, 2]), made(1, 1, [7]), made(2, 0, [1]), made(2, 1, [3])]
    torn = [made(1, 0, [4, 2]), made(1, 1, [7]), made(2, 0, [1]), *whole]
    assert [each for each in _samples(tmp_path, whole, torn) if "sample" in each] == []
    assert _samples(tmp_path, whole, [*whole[:3], made(2, 1, [5])])[-1] == "step 2 used other samples"
    assert _samples(tmp_path, whole, whole[:3])[-1] == "step 2 used other samples"
    twice = [made(1, 0, [4]), made(2, 0, [4])]
    assert _samples(tmp_path, twice, twice)[-1] == "epoch 0 used sample 4 twice"


def _samples(folder: Path, whole: list[dict[str, Any]], torn: list[dict[str, Any]]) -> list[str]:
    for name in ("whole", "torn"):
        (folder / name / "run").mkdir(parents=True, exist_ok=True)
        (folder / name / "run" / "metrics.jsonl").write_text("")
    return differences(folder / "whole", folder / "torn", whole, torn)


def test_metrics_that_differ_or_stand_there_twice_are_found(tmp_path: Path) -> None:
    lines = [json.dumps({"step": step, "loss": 1 / step, "grad_norm": 1.0, "lr": 0.1}) for step in (1, 2, 3)]
    for torn, problem in (
        ([*lines, lines[1]], "metrics.jsonl has step 2 twice"),
        (lines[:2], "metrics differ, first at step 3"),
        ([lines[0], lines[1].replace("0.5", "0.51"), lines[2]], "metrics differ, first at step 2"),
        ([*lines, lines[0].replace('"step": 1', '"step": 4')], "metrics differ, first at the end"),
    ):
        for name, content in (("whole", lines), ("torn", torn)):
            (tmp_path / name / "run").mkdir(parents=True, exist_ok=True)
            (tmp_path / name / "run" / "metrics.jsonl").write_text("\n".join(content) + "\n")
        assert problem in differences(tmp_path / "whole", tmp_path / "torn", [], [])


# ---------------------------------------------------------------- the report


def test_the_report_says_what_each_kind_cost_and_whether_anything_was_lost() -> None:
    kill = Recovery(Fault(0, Kind.KILL, 1, 2, 0.5), 7, noticed=0.5, started=2.0, resumed=1.0, steps_again=3)
    slow = Recovery(Fault(1, Kind.SLOW, 0, 2, 0.5), 9)
    result = Result([kill, slow], rounds=1, seconds=20.0, undisturbed=5.0)
    assert "| SIGKILL of a rank | 1 | 3.5 s (3.5 s) | 0.5 s | 2.0 s | 1.0 s | 3 (3) |" in as_table(result)
    assert "| a rank slowed down | 1 | training went on" in as_table(result)
    words = as_words(result)
    assert "faults survived      2, in 1 run(s)" in words
    assert "3.5 s (median)" in words and "loading 1.5 s (median)" in words
    assert "goodput              25%" in words
    assert "nothing was lost" in words
    assert as_data(result, 3)["recovery_seconds_median"] == 3.5
    lost = Result([], problems=["round 1: step 2 used other samples"])
    assert "LOST:\n  round 1: step 2 used other samples" in as_words(lost) and "nothing was lost" not in as_words(lost)
