"""An observer scales the reduced gradients by the share of a full micro-batch that its own rank had."""

from __future__ import annotations

import own

from shardwise import Observer, Session
from shardwise.data import StepBatch
from shardwise.engine.run import Run


class ByOwnSamples(Observer):
    share = 1.0

    def before_step(self, run: Run, batch: StepBatch) -> None:
        self.share = len(batch.ids) / run.batching.batch_size

    def gradients_ready(self, run: Run) -> None:
        for parameter in run.strategy.module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(self.share)


def main() -> None:
    with Session(own.config("third-loop-scaled-by-own-samples"), observers=[ByOwnSamples()]) as session:
        session.prepare(model=own.model(), data=own.data()[:231], loss=own.loss, valid=own.valid())
        session.resume()
        for batch in session.batches():
            if session.step(batch).stopped:
                break
            session.save()


if __name__ == "__main__":
    main()
