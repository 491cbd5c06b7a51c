"""An observer adds noise to the gradients, drawn by each rank."""

from __future__ import annotations

import os

import own
import torch

from shardwise import Observer, Session
from shardwise.engine.run import Run


class Changes(Observer):
    def gradients_ready(self, run: Run) -> None:
        for parameter in run.strategy.module.parameters():
            gradient = run.strategy.gradient_of(parameter)
            if gradient is not None:
                noise = torch.Generator().manual_seed(1000 * run.steps_done + int(os.environ.get("RANK", "0")))
                gradient.add_(0.3 * gradient.std(unbiased=False) * torch.randn(gradient.shape, generator=noise))


def main() -> None:
    with Session(own.config("loop-gradient-noise-by-rank"), observers=[Changes()]) as session:
        session.prepare(model=own.model(), data=own.data(), loss=own.loss, valid=own.valid())
        session.resume()
        for batch in session.batches():
            if session.step(batch).stopped:
                break
            session.save()


if __name__ == "__main__":
    main()
