"""What rounding explains: measured, and never less than the last digits of a number."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.verify.measure import Curve, Figures, Tolerance, weights_apart

START = {"norm": torch.ones(16)}


def figures(norm: Tensor) -> Figures:
    return Figures(Curve([1.0], [1.0], [0.1], [[0]], [1]), {"norm": torch.ones(16)}, {1: {"norm": norm}})


def test_a_weight_may_be_off_in_its_last_digits_where_the_repeated_runs_happened_not_to_be() -> None:
    trained = torch.full((16,), 0.994)
    tolerance = Tolerance.measured(figures(trained), [figures(trained.clone())] * 2, "32-true", START, {})
    for units, allowed in ((1, True), (4, True), (40, False)):
        off = trained.clone()
        off[3] *= 1 + units * torch.finfo(torch.float32).eps
        gap = weights_apart({"norm": off}, {"norm": trained}, START)["norm"]
        assert (gap <= tolerance.weights[1]["norm"]) == allowed, units


def test_a_weight_that_moves_when_the_order_does_may_be_twenty_times_as_far_apart() -> None:
    trained, moved = torch.full((16,), 0.9), torch.full((16,), 0.9 + 1e-5)
    tolerance = Tolerance.measured(figures(trained), [figures(moved)], "32-true", START, {})
    for times, allowed in ((15, True), (25, False)):
        gap = weights_apart({"norm": trained + times * 1e-5}, {"norm": trained}, START)["norm"]
        assert (gap <= tolerance.weights[1]["norm"]) == allowed, times
