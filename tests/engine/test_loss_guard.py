"""What counts as bad, and what is done about it."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from shardwise.config import Training
from shardwise.engine.loss_guard import (
    ENOUGH,
    HISTORY,
    BadLoss,
    Decision,
    LossHistory,
    judge,
    stop_because,
    what_happened,
)
from shardwise.errors import LossSpike, NonFiniteError

FLAT = [2.0] * HISTORY


def verdict_on(
    loss: float | None, norm: float = 1.0, recent: list[float] = FLAT, scaled: bool = False, **options: Any
) -> Any:
    return judge(Training(**options), norm, loss, LossHistory(recent), scaled=scaled)


def test_a_loss_far_above_the_last_ones_is_a_spike() -> None:
    found, limit = verdict_on(2.5, on_spike="rollback"), pytest.approx(2.2)
    assert found == Decision("spike", "rollback", limit=limit)  # type: ignore[arg-type]
    assert verdict_on(2.1, on_spike="rollback") is None
    assert verdict_on(2.5, on_spike="rollback", spike_factor=100.0) is None
    assert verdict_on(2.5) is None, "nobody asked"


def test_without_enough_losses_none_is_called_a_spike() -> None:
    assert verdict_on(1e9, recent=FLAT[: ENOUGH - 1], on_spike="stop") is None
    assert verdict_on(1e9, recent=FLAT[:ENOUGH], on_spike="stop") is not None


def test_spikes_that_came_before_do_not_hide_the_next() -> None:
    recent = [2.0] * 80 + [50.0] * 20
    assert verdict_on(50.0, recent=recent, on_spike="skip") is not None


def test_an_ordinary_noisy_falling_curve_has_no_spikes() -> None:
    draw = random.Random(0)
    losses = LossHistory()
    for step in range(20_000):
        loss = (1 + 4 * math.exp(-step / 500)) * math.exp(draw.gauss(0, 0.15))
        assert judge(Training(on_spike="stop"), 1.0, loss, losses, scaled=False) is None, step
        losses.add(loss)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_loss_or_gradient_that_is_no_number_is_dealt_with_as_asked(bad: float) -> None:
    assert verdict_on(None, norm=bad) == Decision("nonfinite", "stop")
    assert verdict_on(None, norm=bad, on_nonfinite="skip") == Decision("nonfinite", "skip")
    assert verdict_on(bad, on_nonfinite="rollback") == Decision("nonfinite", "rollback")
    assert verdict_on(bad, on_nonfinite="skip", on_spike="ignore") is None, (
        "its gradient is finite, so nothing is spoilt"
    )
    assert verdict_on(bad, on_nonfinite="skip", on_spike="skip").what == "spike"


def test_under_fp16_an_overflow_of_the_gradient_is_how_the_loss_scale_is_found() -> None:
    assert verdict_on(2.0, norm=math.inf, scaled=True, on_nonfinite="rollback") is None
    assert verdict_on(math.nan, norm=math.inf, scaled=True, on_nonfinite="rollback").act == "rollback"


def test_the_message_names_rank_samples_and_ways_out() -> None:
    guilty = BadLoss(step=4, epoch=0, rank=1, loss=math.inf, samples=[17, 3], guilty=True)
    error = stop_because(4, Decision("nonfinite", "stop"), [guilty])
    assert isinstance(error, NonFiniteError)
    assert "step 4: the loss is not finite on rank 1, samples 17, 3." in str(error)
    assert "training.on_nonfinite: skip" in str(error) and "rollback" in str(error)
    jumped = BadLoss(step=4, epoch=0, rank=2, loss=31.25, samples=[5], guilty=True)
    spike = stop_because(4, Decision("spike", "stop", limit=2.2), [jumped])
    assert isinstance(spike, LossSpike)
    assert "the loss jumped to 31.25, above 2.2, on rank 2, samples 5" in str(spike)
    innocent = BadLoss(step=4, epoch=0, rank=0, loss=2.0, samples=list(range(20)), guilty=False)
    said = what_happened(Decision("nonfinite", "skip"), [innocent])
    assert "overflowed on the way back (rank 0, samples 0, 1" in said and "and 4 more" in said
