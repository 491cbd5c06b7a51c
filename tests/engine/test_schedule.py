"""The learning rate, step by step."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.config.schema import Scheduler
from shardwise.engine.schedule import Schedule

PEAK = 0.4
NAMES = ["cosine_warmup", "linear_warmup", "constant"]


def rates(run_steps: int, *, steps: int | None = None, **options: Any) -> list[float]:
    schedule = Schedule(Scheduler(**options), PEAK, run_steps)
    return [schedule.rate(step) for step in range(steps or run_steps)]


@given(
    name=st.sampled_from(NAMES),
    warmup=st.integers(0, 50),
    run_steps=st.integers(1, 200),
    floor=st.floats(0, 1),
)
def test_no_step_of_a_run_is_wasted_or_above_the_peak(name: str, warmup: int, run_steps: int, floor: float) -> None:
    curve = rates(run_steps, name=name, warmup_steps=warmup, min_lr_ratio=floor)
    assert curve[0] > 0, "a first step with rate zero would do nothing"
    assert all(0 < rate <= math.nextafter(PEAK, 1) for rate in curve), "rounding may add a last digit, nothing more"
    assert all(rate <= later for rate, later in itertools.pairwise(curve[:warmup])), "warmup rises"
    assert all(rate >= later for rate, later in itertools.pairwise(curve[warmup:])), "what follows never rises"


@pytest.mark.parametrize("name", NAMES)
def test_warmup_is_a_straight_line_that_ends_at_the_peak(name: str) -> None:
    curve = rates(20, name=name, warmup_steps=4)
    assert curve[:5] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4])


@pytest.mark.parametrize("name", NAMES)
def test_without_warmup_the_first_step_has_the_peak(name: str) -> None:
    assert rates(10, name=name)[0] == PEAK


def test_the_cosine_is_half_way_in_the_middle_and_flat_at_both_ends() -> None:
    curve = rates(108, name="cosine_warmup", warmup_steps=8)
    assert curve[8 + 50] == pytest.approx(PEAK / 2)
    assert curve[8 + 25] == pytest.approx(PEAK * (1 + math.sqrt(0.5)) / 2)
    steepness = [curve[step] - curve[step + 1] for step in (8, 58, 106)]
    assert steepness[1] > 10 * max(steepness[0], steepness[2])


def test_the_line_falls_by_the_same_amount_at_every_step() -> None:
    assert rates(9, name="linear_warmup", warmup_steps=1, steps=10) == pytest.approx(
        [0.4, 0.4, 0.35, 0.3, 0.25, 0.2, 0.15, 0.1, 0.05, 0.0]
    )


def test_constant_stays_at_the_peak() -> None:
    assert rates(50, name="constant", steps=60) == [PEAK] * 60


@pytest.mark.parametrize("name", ["cosine_warmup", "linear_warmup"])
def test_the_floor_is_reached_at_the_end_and_kept_after_it(name: str) -> None:
    curve = rates(30, name=name, warmup_steps=3, min_lr_ratio=0.25, steps=40)
    assert curve[30:] == pytest.approx([0.1] * 10)
    assert all(rate > 0.1 for rate in curve[3:30])


@pytest.mark.parametrize("name", ["cosine_warmup", "linear_warmup"])
def test_a_total_of_its_own_ends_the_decay_before_or_after_the_run(name: str) -> None:
    assert rates(100, name=name, total_steps=10)[10:] == [0.0] * 90
    assert rates(50, name=name, total_steps=100) == rates(100, name=name)[:50]


@pytest.mark.parametrize(("ratio", "run_steps", "warmup"), [(0.1, 40, 4), (0.25, 10, 2), (0.0, 40, 0), (0.01, 10, 0)])
def test_a_ratio_is_a_share_of_all_steps(ratio: float, run_steps: int, warmup: int) -> None:
    schedule = Schedule(Scheduler(warmup_ratio=ratio), PEAK, run_steps)
    assert schedule.warmup_steps == warmup
    expected = Schedule(Scheduler(warmup_steps=warmup), PEAK, run_steps)
    assert [schedule.rate(step) for step in range(run_steps)] == [expected.rate(step) for step in range(run_steps)]


def test_a_ratio_is_of_the_total_that_is_given_and_not_of_the_run() -> None:
    assert Schedule(Scheduler(warmup_ratio=0.1, total_steps=200), PEAK, run_steps=50).warmup_steps == 20


def test_a_run_shorter_than_its_warmup_does_not_reach_the_peak() -> None:
    assert rates(5, warmup_steps=10) == pytest.approx([0.04, 0.08, 0.12, 0.16, 0.2])
