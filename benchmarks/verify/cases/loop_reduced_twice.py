"""An observer adds the gradients up over the ranks by hand, which was done already."""

from __future__ import annotations

import own
import torch.distributed as dist

from shardwise import Observer, Session
from shardwise.engine.run import Run


class Changes(Observer):
    def gradients_ready(self, run: Run) -> None:
        for parameter in run.strategy.module.parameters():
            gradient = run.strategy.gradient_of(parameter)
            if gradient is not None and dist.is_initialized():
                dist.all_reduce(gradient)


def main() -> None:
    with Session(own.config("loop-reduced-twice"), observers=[Changes()]) as session:
        session.prepare(model=own.model(), data=own.data(), loss=own.loss, valid=own.valid())
        session.resume()
        for batch in session.batches():
            if session.step(batch).stopped:
                break
            session.save()


if __name__ == "__main__":
    main()
