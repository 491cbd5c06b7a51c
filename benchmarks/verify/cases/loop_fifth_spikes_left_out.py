"""An observer leaves out the update where the loss of the own samples is above the last one: on that rank alone."""

from __future__ import annotations

import own
from torch import Tensor, nn

from shardwise import Loss, Observer, Session
from shardwise.engine.run import Run


class Spikes(Observer):
    """Remembers the loss of the rank's own samples."""

    def __init__(self) -> None:
        self.last, self.now = float("inf"), 0.0

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        loss = own.loss(model, batch)
        if model.training:
            self.now = float(loss.sum.detach()) / max(1, len(batch[0]))
        return loss

    def gradients_ready(self, run: Run) -> None:
        if self.now > 1.02 * self.last:
            for parameter in run.strategy.module.parameters():
                if parameter.grad is not None:
                    parameter.grad.zero_()
        self.last = self.now


def main() -> None:
    spikes = Spikes()
    with Session(own.config("fifth-loop-spikes-left-out"), observers=[spikes]) as session:
        session.prepare(model=own.model(), data=own.data(), loss=spikes.loss)
        session.resume()
        for batch in session.batches():
            if session.step(batch).stopped:
                break
            session.save()


if __name__ == "__main__":
    main()
