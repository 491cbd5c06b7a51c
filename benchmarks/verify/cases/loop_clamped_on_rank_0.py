"""An observer clamps the weights after each step, on the first rank alone."""

from __future__ import annotations

import own
import torch

from shardwise import Observer, Session
from shardwise.engine.run import Run


class Changes(Observer):
    def after_step(self, run: Run, batch: object, result: object) -> None:
        if run.world.is_first and run.world.size > 1:
            with torch.no_grad():
                for parameter in run.strategy.module.parameters():
                    parameter.clamp_(-0.1, 0.1)


def main() -> None:
    with Session(own.config("loop-clamped-on-rank-0"), observers=[Changes()]) as session:
        session.prepare(model=own.model(), data=own.data(), loss=own.loss, valid=own.valid())
        session.resume()
        for batch in session.batches():
            if session.step(batch).stopped:
                break
            session.save()


if __name__ == "__main__":
    main()
