"""A rank leaves the loop when its own patience is over; the others go on."""

from __future__ import annotations

import os

import own

from shardwise import Session


def main() -> None:
    with Session(own.config("loop-one-rank-stops")) as session:
        session.prepare(model=own.model(), data=own.data(), loss=own.loss, valid=own.valid())
        session.resume()
        for batch in session.batches():
            if session.step(batch).stopped:
                break
            session.save()
            if os.environ.get("RANK") == "1" and session.steps_done >= 3:
                break


if __name__ == "__main__":
    main()
