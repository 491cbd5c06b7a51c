"""The weight of a term grows with a counter of the script, which begins at 0 after a resume."""

from __future__ import annotations

import own
from torch import Tensor, nn

from shardwise import Loss, Session

STEPS = {"done": 0}


def loss(model: nn.Module, batch: list[Tensor]) -> Loss:
    plain = own.loss(model, batch)
    return Loss(sum=plain.sum * (1 + 0.5 * STEPS["done"]), count=plain.count)


def main() -> None:
    with Session(own.config("loop-own-step-counter")) as session:
        session.prepare(model=own.model(), data=own.data(), loss=loss)
        session.resume()
        for batch in session.batches():
            if session.step(batch).stopped:
                break
            STEPS["done"] += 1
            session.save()


if __name__ == "__main__":
    main()
