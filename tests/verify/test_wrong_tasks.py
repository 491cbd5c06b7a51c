"""Tasks that are wrong in one way each are caught, and the cause is named. Nothing is planted in shardwise itself."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardwise.verify.causes import Cause
from tests.verify.planting import run

# (task, strategy, cause that must be named first)
WRONG = [
    ("Centring", "ddp", Cause.OWN_BUFFERS),
    ("Centring", "fsdp", Cause.OWN_BUFFERS),
    ("Noisy", "ddp", Cause.RANDOM_FORWARD),
    ("MadeAnew", "ddp", Cause.DATA_CHANGE),
    ("Detached", "ddp", Cause.DETACHED_PARAMETER),
    ("Detached", "fsdp", Cause.DETACHED_PARAMETER),
    ("Mean", "ddp", Cause.LOSS_IS_NO_SUM),
    ("Overlapping", "ddp", Cause.OVERLAP),
    ("DrawsPerBatch", "ddp", Cause.ORDER_MATTERS),
    ("FromASet", "ddp", Cause.DATA_BY_HASH),
    ("FromAFolder", "ddp", Cause.DATA_BY_LISTING),
    ("SlowAndByRank", "ddp", Cause.DATA_BY_RANK),
    ("ByThreads", "ddp", Cause.DATA_BY_RANK),
    ("HeldOutInAnotherType", "ddp", Cause.OVERLAP),
    ("LeavingOut", "ddp", Cause.LOSS_IS_NO_SUM),
    ("MaxNorm", "ddp", Cause.WEIGHTS_BY_SAMPLES),
    ("ClampingHook", "ddp", Cause.CLIPPED_BEFORE_REDUCED),
    ("Remembering", "ddp", Cause.EVALUATION_RANDOM),
    ("Freezing", "ddp", Cause.EVALUATION_CHANGES),
    ("Switching", "ddp", Cause.EVALUATION_CHANGES),
    ("Reseeding", "ddp", Cause.EVALUATION_CHANGES),
    ("CountedOnRankZero", "ddp", Cause.METRIC_OF_SOME_RANKS),
    ("MeanOfMicroBatches", "fsdp", Cause.METRIC_DIFFERS),
    ("AddingUp", "ddp", Cause.EVALUATION_RANDOM),
    ("Normalising", "ddp", Cause.HIDDEN_STATE),
    ("WithReplacement", "ddp", Cause.REPEATED),
    ("RareMean", "ddp", Cause.LOSS_IS_NO_SUM),
]


@pytest.mark.parametrize(("task", "strategy", "cause"), WRONG, ids=str)
def test_what_is_wrong_with_a_task_is_named(task: str, strategy: str, cause: Cause, tmp_path: Path) -> None:
    report = run(tmp_path, "nothing", f"tests.verify.toys:{task}", strategy)
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
    report = run(tmp_path, "nothing", "tests.verify.toys:EveryOther")
    assert report.answer == "not proved", report.as_text()
    check = next(check for check in report.checks if check.name == "samples distinct")
    assert check.status == "not proved" and "26 are copies of another, 1 of 0 for example" in check.detail
