"""Only the first rank resumes, "since the others get its weights anyway"."""

from __future__ import annotations

import own

from shardwise import Session


def main() -> None:
    with Session(own.config("fifth-loop-resumes-on-rank-0")) as session:
        session.prepare(model=own.model(), data=own.data(), loss=own.loss, valid=own.valid())
        if session.world.is_first:
            session.resume()
        for batch in session.batches():
            if session.step(batch).stopped:
                break
            session.save()


if __name__ == "__main__":
    main()
