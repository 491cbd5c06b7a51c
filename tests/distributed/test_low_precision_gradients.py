"""Replicas that compute with narrow copies: every gradient counts once, whether its weight has a copy or not."""

from __future__ import annotations

import pytest
import torch

from shardwise.engine import step as step_module
from shardwise.engine.session import Session
from tests.distributed.pool import RankPool
from tests.tasks import config_of

TEXT = (
    "task: tests.tasks:Ragged\ntraining: {batch_size: 2, precision: bf16-mixed, narrow_weights: true, max_steps: 1}\n"
)


def norms_of_the_first_step(overrides: list[str]) -> dict[str, float]:
    """Of the gradient of each parameter."""
    found: dict[str, float] = {}
    with Session(config_of(TEXT, overrides)) as session:
        session.prepare()
        spread, original = session.parts.strategy, step_module.global_norm

        def look(grads: list[torch.Tensor]) -> torch.Tensor:
            for name, parameter in spread.module.named_parameters():
                gradient = spread.gradient_of(parameter)
                assert gradient is not None
                found[name] = float(gradient.float().norm())
            return original(grads)

        step_module.global_norm = look
        try:
            session.step(next(session.batches()))
        finally:
            step_module.global_norm = original
    return found


@pytest.mark.parametrize("accumulation", [1, 2])
def test_norms_weights_have_the_gradient_of_one_process_in_every_replica(ranks: RankPool, accumulation: int) -> None:
    """Layer norms stay in fp32 and have no copy: DDP's bucket has all of their gradient already."""
    batch = f"training.total_batch_size={4 * accumulation}"
    alone = ranks.run(1, norms_of_the_first_step, [batch, "training.strategy=single"])[0]
    for found in ranks.run(2, norms_of_the_first_step, [batch, "training.strategy=ddp"]):
        assert found == pytest.approx(alone, rel=0.1)
