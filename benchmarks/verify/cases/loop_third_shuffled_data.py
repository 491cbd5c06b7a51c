"""The loop shuffles its samples by random.shuffle, without a seed, before it hands them over."""

from __future__ import annotations

import random

import own

from shardwise import Session


def main() -> None:
    samples = own.data()
    random.shuffle(samples)
    with Session(own.config("third-loop-shuffled-data")) as session:
        session.prepare(model=own.model(), data=samples, loss=own.loss, valid=own.valid())
        session.resume()
        for batch in session.batches():
            if session.step(batch).stopped:
                break
            session.save()


if __name__ == "__main__":
    main()
