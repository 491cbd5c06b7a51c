"""What is right passes: the toy task under every strategy, the four tasks that come with shardwise, a program's own loop."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from shardwise.errors import ConfigError, LaunchError
from shardwise.verify.causes import Cause
from shardwise.verify.proof import verify
from shardwise.verify.report import Check, Report
from tests.cli.program import shardwise
from tests.conftest import REPOSITORY

CONFIG = """
task: {task}
training: {{batch_size: 3, gradient_accumulation: 2, optimizer: {{lr: 0.01}}, {more}}}
"""
SMALL = {
    "chess": ["data.num_games=60", "data.max_plies=8", "model.hidden_dim=16", "training.batch_size=4"],
    "cells": ["data.num_cells=200", "model.hidden_dim=16", "training.batch_size=4"],
    "segmentation": ["data.num_subjects=10", "data.size=[16,16,16]", "data.num_workers=0"],
    "images": ["data.num_images=100", "training.batch_size=8", "model.widths=[16,32,64]", "data.num_workers=0"],
}


def write(folder: Path, task: str = "tests.tasks:Ragged", more: str = "", name: str = "toy.yaml") -> Path:
    config = folder / name
    config.write_text(CONFIG.format(task=task, more=more))
    return config


def named(report: Report, name: str) -> Check:
    return next(check for check in report.checks if check.name == name)


@pytest.mark.parametrize(
    ("strategy", "ranks", "more"),
    [
        ("single", 1, ""),
        ("ddp", 2, "precision: bf16-mixed"),
        ("ddp", 2, "gradient_clip: 0.01"),
        ("zero1", 2, ""),
        ("fsdp", 3, ""),
        ("pipeline", 2, ""),
        ("tensor", 2, ""),
        ("fsdp", 2, "precision: 16-mixed, fsdp: {activation_checkpointing: true, min_num_params: 10}"),
    ],
)
def test_the_toy_task_passes_under_every_strategy(strategy: str, ranks: int, more: str, tmp_path: Path) -> None:
    report = verify(write(tmp_path, more=more), ranks=ranks, strategy=strategy)
    assert report.passed, report.as_text()
    groups = {check.group for check in report.checks if check.status == "pass"}
    assert groups == {"parity", "coverage", "evaluation", "resume"} | ({"agreement"} if ranks > 1 else set())


def test_batch_norm_is_explained_and_passes_with_a_note(tmp_path: Path) -> None:
    report = verify(write(tmp_path, "tests.verify.toys:Normed"))
    assert report.passed, report.as_text()
    assert named(report, "batch norm").status == "note"
    assert named(report, "buffers").status == "pass"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_buffer_of_a_ranks_own_samples_that_no_gradient_depends_on_is_noted(strategy: str, tmp_path: Path) -> None:
    report = verify(write(tmp_path, "tests.verify.toys:Watching"), strategy=strategy)
    assert report.passed, report.as_text()
    assert named(report, "running buffers").status == "note"
    assert "after step 1, norm.mean on rank 1 is not that of rank 0" in named(report, "running buffers").detail


@pytest.mark.parametrize("task", ["Looking", "Counting"])
def test_attributes_that_no_number_depends_on_are_no_failure(task: str, tmp_path: Path) -> None:
    report = verify(write(tmp_path, f"tests.verify.toys:{task}"))
    assert report.passed, report.as_text()


def test_the_quick_proof_says_what_it_leaves_out(tmp_path: Path) -> None:
    report = verify(write(tmp_path), quick=True)
    assert report.passed, report.as_text()
    assert {check.group for check in report.checks} == {"parity", "coverage", "agreement"}
    left_out = [line for line in report.not_looked_at if "--quick" in line]
    assert [line.partition(" (")[0] for line in left_out] == [
        "evaluation",
        "resume",
        "data in interpreters of their own",
    ]


def test_frozen_parameters_are_no_failure(tmp_path: Path) -> None:
    report = verify(write(tmp_path, "tests.verify.toys:Frozen"), strategy="fsdp")
    assert report.passed, report.as_text()


@pytest.mark.parametrize(("strategy", "ranks"), [("ddp", 2), ("fsdp", 2), ("fsdp", 4)])
def test_a_loss_over_the_whole_batch_passes(strategy: str, ranks: int) -> None:
    """With a step that has one sample, so that all ranks but one have none; resumed on fewer ranks, which compute more each."""
    report = verify(REPOSITORY / "examples" / "pairs.yaml", strategy=strategy, ranks=ranks)
    assert report.exit_code == 0, report.as_text()
    assert {check.status for check in report.checks} == {"pass"}, report.as_text()
    assert named(report, f"resumed on {ranks // 2} rank(s)").status == "pass"


def test_a_loss_over_the_whole_batch_that_does_not_gather_fails(tmp_path: Path) -> None:
    text = (REPOSITORY / "examples" / "pairs.py").read_text()
    for name in ("left", "right"):
        text = text.replace(f"gather_batch({name})", f"({name}, slice(0, len({name})))")
    (tmp_path / "pairs_apart.py").write_text(text)
    config = (REPOSITORY / "examples" / "pairs.yaml").read_text().replace("pairs:", "pairs_apart:")
    (tmp_path / "pairs.yaml").write_text(config)
    report = verify(tmp_path / "pairs.yaml")
    assert report.causes[0] is Cause.LOSS_IS_NO_SUM, report.as_text()


def test_a_loss_over_the_whole_batch_is_not_accumulated_and_batch_norm_is_not_proved(tmp_path: Path) -> None:
    config = REPOSITORY / "examples" / "pairs.yaml"
    with pytest.raises(ConfigError, match="gather_batch does not go with gradient accumulation, here over 2"):
        verify(config, overrides=["training.gradient_accumulation=2"])
    text = (REPOSITORY / "examples" / "pairs.py").read_text().replace("nn.GELU()", "nn.BatchNorm1d(4 * width)")
    (tmp_path / "pairs_normed.py").write_text(text)
    (tmp_path / "pairs.yaml").write_text(config.read_text().replace("pairs:", "pairs_normed:"))
    report = verify(tmp_path / "pairs.yaml", overrides=["training.batch_size=8"])
    assert report.exit_code == 3, report.as_text()
    assert named(report, "batch norm").status == "not proved"


def test_everything_awkward_is_brought_into_play(tmp_path: Path) -> None:
    """Ragged, full and short batches, one with fewer samples than ranks; clipping; and dropout, which is switched off."""
    report = verify(write(tmp_path), ranks=4, overrides=["model.dropout=0.5"])
    assert report.passed, report.as_text()
    assert "(17, 24, 24, 3, 24, 24, 3 samples)" in named(report, "samples").detail
    assert any("dropout is off" in line for line in report.about)
    assert any("the config has no gradient_clip" in line for line in report.about)
    detail = named(report, "gradient norm").detail
    assert "clipped at" in detail and "in 0 of them" not in detail


def test_compressed_gradients_travel_whole_and_it_is_said(tmp_path: Path) -> None:
    report = verify(write(tmp_path, more="ddp: {comm_hook: fp16, bucket_cap_mb: 1.0}"))
    assert report.passed, report.as_text()
    assert any("comm_hook fp16 is switched off" in line for line in report.about)


def test_two_configs_are_compared_with_each_other(tmp_path: Path) -> None:
    first, second = write(tmp_path), write(tmp_path, more="fsdp: {}", name="other.yaml")
    report = verify(first, against=second)
    assert report.passed, report.as_text()
    assert "other.yaml" in report.about[0]
    third = write(tmp_path, name="third.yaml")
    third.write_text(third.read_text().replace("lr: 0.01", "lr: 0.02"))
    report = verify(first, against=third)
    assert report.causes[0] is Cause.SCHEDULE, report.as_text()


def test_a_loop_of_ones_own_is_verified_like_a_config(in_tmp: Path) -> None:
    report = verify(REPOSITORY / "examples" / "own_loop.py", steps=52)
    assert report.passed, report.as_text()
    assert named(report, "its own saving").detail == "the program saves by itself, after step 50"
    assert named(report, "its own resume").status == "pass"
    assert not (in_tmp / "runs").exists(), "run folders of verify are temporary"


@pytest.mark.parametrize("task", SMALL)
def test_the_tasks_that_come_with_shardwise_pass(task: str, tmp_path: Path) -> None:
    overrides = [word for override in SMALL[task] for word in ("--set", override)]
    config = str(REPOSITORY / "configs" / f"{task}-tiny.yaml")
    done = shardwise(tmp_path, "verify", config, "--json", *overrides, SHARDWISE_CACHE=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(done.stdout)
    assert document["passed"] and document["causes"] == []
    assert "one process: the first batch" in done.stderr


def test_a_failure_has_exit_code_1_and_an_error_2(tmp_path: Path) -> None:
    done = shardwise(tmp_path, "verify", str(write(tmp_path, "tests.verify.toys:Overlapping")))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Likely cause: validation samples are in the training data." in done.stdout
    assert "validation sample 11 is training sample 0" in done.stdout
    assert shardwise(tmp_path, "verify", "absent.yaml").returncode == 2
    with pytest.raises(LaunchError, match="the disk is on fire"):
        verify(write(tmp_path, "tests.tasks:Unprepared"))


def test_what_cannot_be_verified_is_refused_with_the_reason(tmp_path: Path) -> None:
    config = write(tmp_path)
    for message, options in {
        "at least 4 are needed": {"steps": 2},
        "single is one process, but 2 ranks were started; ddp is for several": {"strategy": "single", "ranks": 2},
    }.items():
        with pytest.raises(ConfigError, match=message):
            verify(config, **options)  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match=r"on 2 stages cannot take 1 micro-batch.*set training.gradient_accumulation to 2"
    ):
        verify(config, strategy="pipeline", overrides=["training.gradient_accumulation=1"])
    with pytest.raises(ConfigError, match="there is no program"):
        verify(tmp_path / "absent.py")
    program = tmp_path / "train.py"
    program.write_text("")
    with pytest.raises(ConfigError, match="--set is for config files"):
        verify(program, overrides=["seed=1"])
    other = write(tmp_path, more="max_epochs: 2", name="other.yaml")
    other.write_text(other.read_text().replace("batch_size: 3", "batch_size: 4"))
    with pytest.raises(ConfigError, match="only runs on the same batches can be compared"):
        verify(config, against=other)


def test_every_cause_is_on_the_page_once_in_the_order_of_the_report() -> None:
    page = (REPOSITORY / "docs" / "verify.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", page.partition("## The causes it can name")[2], re.MULTILINE)
    assert rows == [(cause.name.lower(), cause.value.means) for cause in Cause]
