"""An observer lowers the rate whenever the loss is no better than the best so far: a resume begins with the full rate."""

from __future__ import annotations

import own

from shardwise import Observer, Session
from shardwise.engine.run import Run


class Plateau(Observer):
    def __init__(self) -> None:
        self.share, self.best = 1.0, float("inf")

    def gradients_ready(self, run: Run) -> None:
        for group in run.parts.optimizer.param_groups:
            group["lr"] *= self.share

    def heard(self, loss: float) -> None:
        if loss > 0.97 * self.best:
            self.share *= 0.7
        self.best = min(self.best, loss)


def main() -> None:
    plateau = Plateau()
    with Session(own.config("fourth-loop-rate-on-plateau"), observers=[plateau]) as session:
        session.prepare(model=own.model(), data=own.data(), loss=own.loss, valid=own.valid())
        session.resume()
        for batch in session.batches():
            result = session.step(batch)
            if result.stopped:
                break
            plateau.heard(session.loss(result))
            session.save()


if __name__ == "__main__":
    main()
