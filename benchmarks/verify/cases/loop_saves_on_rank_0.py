"""Only the first rank saves: save speaks with the other ranks."""

from __future__ import annotations

import own

from shardwise import Session


def main() -> None:
    with Session(own.config("loop-saves-on-rank-0")) as session:
        session.prepare(model=own.model(), data=own.data(), loss=own.loss, valid=own.valid())
        session.resume()
        for batch in session.batches():
            if session.step(batch).stopped:
                break
            if session.world.is_first:
                session.save()


if __name__ == "__main__":
    main()
