"""At step 3 the loop switches label smoothing on, by `==`: a run that is resumed behind it never does."""

from __future__ import annotations

import own
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise import Loss, Session

SMOOTHING = {"now": 0.0}


def loss(model: nn.Module, batch: list[Tensor]) -> Loss:
    x, y = batch
    total = F.cross_entropy(model(x), y, reduction="sum", label_smoothing=SMOOTHING["now"])
    return Loss(sum=total, count=len(x))


def main() -> None:
    with Session(own.config("third-loop-switched-once")) as session:
        session.prepare(model=own.model(), data=own.data(), loss=loss, valid=own.valid())
        session.resume()
        for batch in session.batches():
            if session.step(batch).stopped:
                break
            if session.steps_done == 3:
                SMOOTHING["now"] = 0.3
            if session.steps_done % 2 == 0:
                session.save()


if __name__ == "__main__":
    main()
