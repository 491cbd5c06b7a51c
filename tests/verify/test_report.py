"""Three answers: pass, fail, not proved; and what was not looked at."""

from __future__ import annotations

import json

import pytest

from shardwise.verify.causes import Cause
from shardwise.verify.parity import _answer
from shardwise.verify.report import Check, Finding, Report, failed, noted, passed, unproved

PASSED = passed("parity", "loss", "the same")
NOTED = noted("parity", "batch norm", "sees a rank's own samples")
OPEN = unproved("parity", "gradients at step 1", "the same", "rounding explains 40%")
FAILED = failed("parity", "samples", Finding(Cause.SAMPLER, "step 1: others"))


@pytest.mark.parametrize(
    ("checks", "answer", "code", "counts"),
    [
        ([PASSED, NOTED], "pass", 0, "PASS: 1 passed, 0 failed, 0 not proved, 1 noted"),
        ([PASSED, OPEN], "not proved", 3, "NOT PROVED: 1 passed, 0 failed, 1 not proved, 0 noted"),
        ([PASSED, OPEN, FAILED], "fail", 1, "FAIL: 1 passed, 1 failed, 1 not proved, 0 noted"),
    ],
)
def test_the_last_line_counts_all_answers_and_the_exit_code_follows(
    checks: list[Check], answer: str, code: int, counts: str
) -> None:
    report = Report(["about"], checks)
    assert (report.answer, report.exit_code, report.passed) == (answer, code, answer == "pass")
    assert report.as_text().splitlines()[-1].startswith(counts)
    document = json.loads(report.as_json())
    assert (document["answer"], document["exit_code"], document["passed"]) == (answer, code, answer == "pass")


def test_a_tolerance_above_five_percent_proves_nothing_and_says_what_would() -> None:
    assert _answer("loss", "the same", ("the loss", 0.05)).status == "pass"
    check = _answer("loss", "the same", ("the loss", 0.4))
    assert check.status == "not proved"
    assert "Rounding may explain 40% of the loss" in check.why and "More samples per micro-batch" in check.told


def test_what_was_not_looked_at_is_in_the_report() -> None:
    report = Report(["about"], [PASSED], ["dropout: it is off in every run"])
    assert "Not looked at:\n- dropout: it is off in every run\n" in report.as_text()
    assert json.loads(report.as_json())["not_looked_at"] == ["dropout: it is off in every run"]
