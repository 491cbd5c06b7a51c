"""An observer warms the momentum up by a counter of its own, which begins at 0 after a resume."""

from __future__ import annotations

import own

from shardwise import Observer, Session
from shardwise.data import StepBatch
from shardwise.engine.run import Run


class MomentumWarmUp(Observer):
    def __init__(self) -> None:
        self.steps = 0

    def before_step(self, run: Run, batch: StepBatch) -> None:
        self.steps += 1
        for group in run.parts.optimizer.param_groups:
            group["betas"] = (min(0.9, 0.15 * self.steps), 0.999)


def main() -> None:
    with Session(own.config("third-loop-momentum-warm-up"), observers=[MomentumWarmUp()]) as session:
        session.prepare(model=own.model(), data=own.data(), loss=own.loss, valid=own.valid())
        session.resume()
        for batch in session.batches():
            if session.step(batch).stopped:
                break
            session.save()


if __name__ == "__main__":
    main()
