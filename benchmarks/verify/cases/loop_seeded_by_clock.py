"""The loop seeds by the clock before it builds the model."""

from __future__ import annotations

import time

import own
import torch

from shardwise import Session


def main() -> None:
    torch.manual_seed(time.time_ns() % 2**31)
    with Session(own.config("loop-seeded-by-clock")) as session:
        session.prepare(model=own.model(), data=own.data(), loss=own.loss, valid=own.valid())
        session.resume()
        for batch in session.batches():
            if session.step(batch).stopped:
                break
            session.save()


if __name__ == "__main__":
    main()
