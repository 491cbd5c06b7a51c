"""A correct loop with an observer that looks at gradients and changes nothing."""

from __future__ import annotations

import own

from shardwise import Observer, Session
from shardwise.engine.run import Run


class Norms(Observer):
    def __init__(self) -> None:
        self.norms: list[float] = []

    def gradients_ready(self, run: Run) -> None:
        gradients = [run.strategy.gradient_of(p) for p in run.strategy.module.parameters()]
        self.norms.append(sum(float(g.norm()) for g in gradients if g is not None))


def main() -> None:
    with Session(own.config("loop-clean-observer"), observers=[Norms()]) as session:
        session.prepare(model=own.model(), data=own.data(), loss=own.loss, valid=own.valid())
        session.resume()
        for batch in session.batches():
            if session.step(batch).stopped:
                break
        session.save()


if __name__ == "__main__":
    main()
