"""Steps from the same weights: a difference in one of them is found there, beside noise that is large elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.verify.causes import Cause
from shardwise.verify.step_by_step import Noise, Step, check_steps, first_difference

EPS = 1e-7


def steps(
    scale: dict[int, float] | None = None, noise: float = 0.0, moved: dict[int, float] | None = None
) -> list[Step]:
    """Four steps of two parameters. `scale`: of the gradient at a step; `moved`: of the update."""
    found = []
    for number in range(1, 5):
        generator = torch.Generator().manual_seed(number)
        gradients: dict[str, Tensor] = {name: torch.randn(50, generator=generator) for name in ("a", "b")}
        before = {name: torch.randn(50, generator=generator) for name in gradients}
        factor = (scale or {}).get(number, 1.0) + noise * number
        rate = 0.1 * (moved or {}).get(number, 1.0)
        after = {name: before[name] - rate * factor * gradients[name] for name in gradients}
        gradients = {name: factor * each for name, each in gradients.items()}
        found.append(Step(number, gradients, before, after, 2.0 * factor, 1.0, [number], 1))
    return found


def answers(ours: list[Step], noise: float = EPS) -> dict[str, tuple[str, Cause | None]]:
    measured = Noise.measured(steps(), [steps(noise=noise), steps(noise=-noise)], "32-true")
    checks = check_steps(ours, steps(), measured, first_difference(ours, steps(), measured), None)
    return {check.name: (check.status, check.finding.cause if check.finding else None) for check in checks}


def test_the_same_steps_pass() -> None:
    assert {status for status, _ in answers(steps(noise=2 * EPS)).values()} == {"pass"}


def test_a_gradient_that_is_wrong_at_one_late_step_is_found_there() -> None:
    measured = Noise.measured(steps(), [steps(noise=EPS)], "32-true")
    differs = first_difference(steps({3: 1.001}), steps(), measured)
    assert differs is not None and (differs.step, differs.ids, len(differs.bad)) == (3, [3], 2)
    assert answers(steps({3: 1.001}))["gradients of each step"] == ("FAIL", Cause.BEGINS_LATER)
    assert answers(steps({1: 1.001}))["gradients of each step"] == ("FAIL", Cause.GRADIENTS)


def test_an_update_that_is_not_the_optimizers_is_found_though_gradients_are_right() -> None:
    found = answers(steps(moved={2: 1.01}))
    assert found["gradients of each step"][0] == "pass"
    assert found["updates of each step"] == ("FAIL", Cause.SOME_RANKS_UPDATE)


def test_loud_noise_proves_nothing() -> None:
    assert answers(steps(noise=1e-3), noise=0.01)["gradients of each step"][0] == "not proved"


def test_steps_that_agree_to_the_last_digits_are_proved_beside_any_noise() -> None:
    assert answers(steps(), noise=0.01)["gradients of each step"][0] == "pass"
