"""Who is slow, and by what; and silence where nobody is."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from shardwise.watch.stragglers import IN_A_ROW, LEAST_STEPS, Pace, Straggler, Stragglers, Window

USUAL = Pace(host="node", data=0.001, compute=0.050, agree=0.002, step=0.150)


def named(windows: list[list[Pace]]) -> list[Straggler]:
    judge = Stragglers()
    return [each for paces in windows for each in judge.judge(paces)]


def one_slow(size: int, rank: int, **changed: Any) -> list[Pace]:
    return [replace(USUAL, **changed) if each == rank else USUAL for each in range(size)]


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize(
    ("cause", "changed", "words"),
    [
        ("data", {"data": 0.040, "agree": 0.0}, "waits 40 ms per step for its data, the others 1 ms"),
        ("compute", {"compute": 0.080}, "forward passes take 80 ms per step, the others' 50 ms"),
        ("communication", {}, "comes 38 ms later to every step than the others"),
    ],
)
def test_a_rank_that_stays_slow_is_named_once_with_its_cause(size: int, cause: str, changed: Any, words: str) -> None:
    window = one_slow(size, 1, **changed)
    if cause != "compute":  # the others wait for it at the agreement
        window = [replace(pace, agree=0.041) if rank != 1 else pace for rank, pace in enumerate(window)]
    if cause == "communication":
        window[1] = replace(window[1], agree=0.003)
    found = named([window] * 20)
    assert [(each.rank, each.cause) for each in found] == [(1, cause)]
    assert words in found[0].sentence() and "All wait for it" in found[0].sentence()
    assert named([window] * (IN_A_ROW - 1)) == []


def test_a_rank_that_is_slow_now_and_then_is_not_named() -> None:
    usual, slow = [USUAL] * 4, one_slow(4, 2, compute=0.2)
    assert named([slow, slow, usual] * 20) == []


def test_a_rank_slow_by_one_thing_and_then_another_is_not_yet_named() -> None:
    by_compute, by_data = one_slow(4, 2, compute=0.2), one_slow(4, 2, data=0.2)
    assert named([by_compute, by_data] * 20) == []


def test_what_costs_little_is_not_worth_a_word() -> None:
    assert named([one_slow(4, 0, compute=0.060)] * 9) == [], "a fifth slower"
    quick = [replace(USUAL, compute=0.001, step=0.004)] * 3
    assert named([[*quick, replace(quick[0], compute=0.005)]] * 9) == [], "five times as slow, and still only 4 ms"
    long_step = [replace(USUAL, compute=0.010, step=2.0)] * 3
    assert named([[*long_step, replace(long_step[0], compute=0.050)]] * 9) == [], "2% of the step"


@pytest.mark.parametrize("ranks", [2, 4, 16])
@pytest.mark.parametrize("noise", [0.1, 0.3, 0.5])
def test_noise_of_a_busy_machine_raises_no_alarm(ranks: int, noise: float) -> None:
    """Every step of every rank is longer or shorter at random, and now and then one is interrupted for long."""
    draw = random.Random(ranks)
    windows = [Window("node") for _ in range(ranks)]
    judge = Stragglers()
    for _ in range(300):
        for window in windows:
            for _ in range(LEAST_STEPS):
                hiccup = draw.expovariate(10) if draw.random() < 0.02 else 0.0
                forward = 0.03 * draw.lognormvariate(0, noise) + hiccup
                times = {"wait": draw.expovariate(500), "agree": draw.expovariate(200), "update": 0.01}
                window.add({**times, "compute": 3 * forward, "forward": forward})
        assert judge.judge([window.read() for window in windows]) == []


@pytest.mark.parametrize("ranks", [2, 4, 16])
def test_a_slow_rank_is_found_in_that_noise(ranks: int) -> None:
    draw = random.Random(ranks)
    windows = [Window("node") for _ in range(ranks)]
    judge = Stragglers()
    found = []
    for _ in range(30):
        for rank, window in enumerate(windows):
            for _ in range(LEAST_STEPS):
                forward = 0.03 * draw.lognormvariate(0, 0.3) * (2 if rank == 1 else 1)
                window.add(
                    {"wait": 0.0, "agree": draw.expovariate(200), "update": 0.01, "compute": 0.12, "forward": forward}
                )
        found += judge.judge([window.read() for window in windows])
    assert [(each.rank, each.cause) for each in found] == [(1, "compute")]


def test_too_few_steps_wait_for_the_next_reading_and_left_out_ones_do_not_count() -> None:
    window = Window("node")
    for _ in range(LEAST_STEPS - 1):
        window.add({"wait": 0.0, "agree": 0.0, "forward": 0.01})
        window.add({"wait": 0.5})
    assert window.read() is None
    window.add({"wait": 0.0, "agree": 0.0, "forward": 0.01})
    assert window.read() is not None and window.read() is None


def test_one_rank_has_nobody_to_be_slower_than() -> None:
    assert named([[USUAL]] * 9) == [] and named([[]]) == []
