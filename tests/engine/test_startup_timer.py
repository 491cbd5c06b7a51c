"""A start that takes long says on what."""

from __future__ import annotations

import os
import time

import pytest

from shardwise.engine import startup_timer
from shardwise.engine.startup_timer import StartupTimer
from shardwise.watch.procfs import age_of


def test_laps_add_up_and_a_short_start_is_not_worth_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    start = StartupTimer()
    for what in ("model", "weights", "model"):
        now[0] += 0.06
        start.lap(what)
    assert start.sentence() is None
    assert start.seconds == pytest.approx({"model": 0.12, "weights": 0.06})
    monkeypatch.setattr(startup_timer, "WORTH_SAYING", 0.1)
    said = start.sentence()
    assert said is not None
    assert said == "ready after 0.2 s: model 0.1, weights 0.1"


def test_what_a_program_did_before_counts_as_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup_timer, "age_of", lambda pid: 7.0)
    start = StartupTimer()
    start.seconds = {"rendezvous": 2.0}
    start.of_a_program()
    assert start.seconds == {"imports": 5.0, "rendezvous": 2.0}
    assert next(iter(start.seconds)) == "imports"


def test_the_age_of_this_process_is_known_here() -> None:
    age = age_of(os.getpid())
    assert age is not None
    time.sleep(0.05)
    later = age_of(os.getpid())
    assert later is not None and 0.03 < later - age < 5
