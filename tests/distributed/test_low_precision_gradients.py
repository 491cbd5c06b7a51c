"""Replicas that compute with narrow copies: every gradient counts once, whether its weight has a copy or not."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise import Observer, Session
from tests.distributed.pool import RankPool
from tests.tasks import config_of

TEXT = (
    "task: tests.tasks:Ragged\ntraining: {batch_size: 2, precision: bf16-mixed, narrow_weights: true, max_steps: 1}\n"
)


class Norms(Observer):
    """Of the gradient of each parameter in the last step."""

    def __init__(self) -> None:
        self.found: dict[str, float] = {}

    def gradients_ready(self, run: Any) -> None:
        for name, parameter in run.strategy.module.named_parameters():
            gradient = run.strategy.gradient_of(parameter)
            assert gradient is not None
            self.found[name] = float(gradient.float().norm())


def norms_of_the_first_step(overrides: list[str]) -> dict[str, float]:
    norms = Norms()
    with Session(config_of(TEXT, overrides), observers=[norms]) as session:
        session.prepare()
        session.step(next(session.batches()))
    return norms.found


@pytest.mark.parametrize("accumulation", [1, 2])
def test_norms_weights_have_the_gradient_of_one_process_in_every_replica(ranks: RankPool, accumulation: int) -> None:
    """Layer norms stay in fp32 and have no copy: DDP's bucket has all of their gradient already."""
    batch = f"training.total_batch_size={4 * accumulation}"
    alone = ranks.run(1, norms_of_the_first_step, [batch, "training.strategy=single"])[0]
    for found in ranks.run(2, norms_of_the_first_step, [batch, "training.strategy=ddp"]):
        assert found == pytest.approx(alone, rel=0.1)
