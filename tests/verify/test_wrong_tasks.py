"""Tasks that are wrong in one way each are caught, and the cause is named. Nothing is planted in shardwise itself."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardwise.verify.causes import Cause
from tests.verify.planting import run

# (task, strategy, cause that must be named first). What numbers and samples show, --quick sees as well.
NUMBERS = [
    ("Centring", "ddp", Cause.OWN_BUFFERS),
    ("Centring", "fsdp", Cause.OWN_BUFFERS),
    ("Noisy", "ddp", Cause.RANDOM_FORWARD),
    ("MadeAnew", "ddp", Cause.DATA_CHANGE),
    ("Detached", "ddp", Cause.DETACHED_PARAMETER),
    ("Detached", "fsdp", Cause.DETACHED_PARAMETER),
    ("Mean", "ddp", Cause.LOSS_IS_NO_SUM),
    ("Overlapping", "ddp", Cause.OVERLAP),
    ("DrawsPerBatch", "ddp", Cause.ORDER_MATTERS),
    ("HeldOutInAnotherType", "ddp", Cause.OVERLAP),
    ("LeavingOut", "ddp", Cause.LOSS_IS_NO_SUM),
    ("MaxNorm", "ddp", Cause.WEIGHTS_BY_SAMPLES),
    ("ClampingHook", "ddp", Cause.CLIPPED_BEFORE_REDUCED),
    ("WithReplacement", "ddp", Cause.REPEATED),
    ("RareMean", "ddp", Cause.LOSS_IS_NO_SUM),
]
ALL_ELSE = [
    ("FromASet", "ddp", Cause.DATA_BY_HASH),
    ("FromAFolder", "ddp", Cause.DATA_BY_LISTING),
    ("SlowAndByRank", "ddp", Cause.DATA_BY_RANK),
    ("ByThreads", "ddp", Cause.DATA_BY_RANK),
    ("Remembering", "ddp", Cause.EVALUATION_RANDOM),
    ("Freezing", "ddp", Cause.EVALUATION_CHANGES),
    ("Switching", "ddp", Cause.EVALUATION_CHANGES),
    ("Reseeding", "ddp", Cause.EVALUATION_CHANGES),
    ("CountedOnRankZero", "ddp", Cause.METRIC_OF_SOME_RANKS),
    ("MeanOfMicroBatches", "fsdp", Cause.METRIC_DIFFERS),
    ("AddingUp", "ddp", Cause.EVALUATION_RANDOM),
    ("Normalising", "ddp", Cause.HIDDEN_STATE),
    ("Mean", "fsdp", Cause.LOSS_IS_NO_SUM),
]


@pytest.mark.parametrize(
    ("task", "strategy", "cause", "quick"),
    [*((*each, True) for each in NUMBERS), *((*each, False) for each in ALL_ELSE)],
    ids=str,
)
def test_what_is_wrong_with_a_task_is_named(
    task: str, strategy: str, cause: Cause, quick: bool, tmp_path: Path
) -> None:
    report = run(tmp_path, "nothing", f"tests.verify.toys:{task}", strategy, quick=quick)
    assert not report.passed
    assert report.causes[0] is cause, report.as_text()


def test_data_that_follow_from_the_loader_worker_are_found_where_the_config_has_workers(tmp_path: Path) -> None:
    report = run(tmp_path, "nothing", "tests.verify.toys:ByWorker", overrides=["data.num_workers=2"])
    assert report.causes[0] is Cause.WORKERS, report.as_text()


def test_the_sample_and_the_tensor_that_change_are_named(tmp_path: Path) -> None:
    report = run(tmp_path, "nothing", "tests.verify.toys:DrawsAnew")
    assert report.causes[0] is Cause.DATA_CHANGE
    assert re.search(r"sample \d+: ids is another", report.findings[0].what), report.as_text()
    assert Cause.RANDOM_FORWARD not in report.causes


def test_samples_that_are_copies_of_others_leave_open_whether_each_is_used_once(tmp_path: Path) -> None:
    report = run(tmp_path, "nothing", "tests.verify.toys:EveryOther", quick=True)
    assert report.answer == "not proved", report.as_text()
    check = next(check for check in report.checks if check.name == "samples distinct")
    assert check.status == "not proved" and "26 are copies of another, 1 of 0 for example" in check.detail


def test_a_parameter_that_rare_samples_train_is_noted(tmp_path: Path) -> None:
    report = run(tmp_path, "nothing", "tests.verify.toys:Rare", "fsdp", quick=True)
    check = next(check for check in report.checks if check.name == "parameters")
    assert report.passed and check.status == "note", report.as_text()
    assert "get no gradient at step 1: embedding.bonus. From other samples they do" in check.detail


def test_a_parameter_that_nothing_trains_is_not_proved_where_the_config_allows_it(tmp_path: Path) -> None:
    allowed = ["training.ddp.find_unused_parameters=true"]
    report = run(tmp_path, "nothing", "tests.verify.toys:Detached", overrides=allowed, quick=True)
    check = next(check for check in report.checks if check.name == "parameters")
    assert report.answer == check.status == "not proved", report.as_text()
    assert "None of 53 samples gives one to norm.weight" in check.detail


def test_a_parameter_that_a_forward_pass_makes_is_named(tmp_path: Path) -> None:
    report = run(tmp_path, "nothing", "tests.verify.toys:Late", quick=True)
    assert Cause.UNSYNCHRONISED_PARAMETER in report.causes, report.as_text()
    assert any("saves it: late.weight, late.bias" in finding.what for finding in report.findings), report.as_text()
