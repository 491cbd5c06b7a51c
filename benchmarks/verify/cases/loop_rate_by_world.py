"""The learning rate is multiplied by WORLD_SIZE by hand."""

from __future__ import annotations

import os

import own

from shardwise import Session


def main() -> None:
    rate = 0.01 * int(os.environ.get("WORLD_SIZE", "1"))
    with Session(own.config("loop-rate-by-world", lr=rate)) as session:
        session.prepare(model=own.model(), data=own.data(), loss=own.loss, valid=own.valid())
        session.resume()
        for batch in session.batches():
            if session.step(batch).stopped:
                break
            session.save()


if __name__ == "__main__":
    main()
