"""How much the inputs are shrunk is drawn for each step from a seeded generator, which begins anew after a resume."""

from __future__ import annotations

import random

import own
from torch import Tensor, nn

from shardwise import Loss, Session


class Shrunk:
    """The loss, on inputs that are shrunk by the same factor on every rank."""

    def __init__(self) -> None:
        self.factor = 1.0

    def __call__(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        return own.loss(model, [batch[0] * self.factor, batch[1]])


def main() -> None:
    draw, loss = random.Random(3), Shrunk()
    with Session(own.config("fifth-loop-strength-drawn")) as session:
        session.prepare(model=own.model(), data=own.data(), loss=loss)
        session.resume()
        for batch in session.batches():
            loss.factor = draw.uniform(0.2, 1.5)
            if session.step(batch).stopped:
                break
            session.save()


if __name__ == "__main__":
    main()
