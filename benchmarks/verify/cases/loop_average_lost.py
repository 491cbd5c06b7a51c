"""An observer keeps an average of the weights in a list and puts it into the model at step 6; a resume begins a new one."""

from __future__ import annotations

import own
import torch
from torch import Tensor

from shardwise import Observer, Session
from shardwise.engine.run import Run


class Changes(Observer):
    def __init__(self) -> None:
        self.kept: list[list[Tensor]] = []

    def after_step(self, run: Run, batch: object, result: object) -> None:
        weights = list(run.strategy.module.parameters())
        self.kept.append([weight.detach().clone() for weight in weights])
        if run.steps_done == 6:
            with torch.no_grad():
                for weight, *before in zip(weights, *self.kept, strict=True):
                    weight.copy_(torch.stack(before).mean(0))


def main() -> None:
    with Session(own.config("loop-average-lost"), observers=[Changes()]) as session:
        session.prepare(model=own.model(), data=own.data(), loss=own.loss, valid=own.valid())
        session.resume()
        for batch in session.batches():
            if session.step(batch).stopped:
                break
            session.save()


if __name__ == "__main__":
    main()
