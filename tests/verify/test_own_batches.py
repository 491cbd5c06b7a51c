"""A loop of one's own that leaves out batches, or trains on one twice, is told."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.config import Batching
from shardwise.verify.coverage import check_own_batches
from shardwise.verify.run_spec import Plan

PLAN = Plan(Batching(world=2, batch_size=2, accumulation=1), window=10, start=6, clip=0.0)
STEPS = [(0, range(6, 10)), (1, range(4)), (1, range(4, 8)), (1, range(8, 10)), (2, range(4))]


def rows(steps: list[tuple[int, range]]) -> list[list[dict[str, Any]]]:
    """By rank: each has every other sample."""
    return [
        [{"step": step, "epoch": epoch, "ids": list(ids)[rank::2]} for step, (epoch, ids) in enumerate(steps, start=1)]
        for rank in range(2)
    ]


def test_nothing_is_said_of_a_loop_that_takes_each_batch_once() -> None:
    assert list(check_own_batches(rows(STEPS), PLAN)) == []


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([*STEPS[:2], STEPS[1], *STEPS[2:]], "step 3 trains once more on samples of its epoch: 0, 1, 2, 3"),
        ([*STEPS[:2], *STEPS[3:]], "of the 10 samples of an epoch, the program trains on 6"),
    ],
)
def test_a_batch_that_is_taken_twice_or_left_out_is_not_proved(steps: list[tuple[int, range]], said: str) -> None:
    (check,) = check_own_batches(rows(steps), PLAN)
    assert (check.status, check.detail) == ("not proved", said)
