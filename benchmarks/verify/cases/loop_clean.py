"""A correct loop: it resumes, trains, saves as it goes and evaluates in the end."""

from __future__ import annotations

import own

from shardwise import Session


def main() -> None:
    with Session(own.config("loop-clean")) as session:
        session.prepare(model=own.model(), data=own.data(), loss=own.loss, valid=own.valid())
        session.resume()
        for batch in session.batches():
            if session.step(batch).stopped:
                break
            if session.steps_done % 2 == 0:
                session.save()
        session.evaluate()
        session.save()


if __name__ == "__main__":
    main()
