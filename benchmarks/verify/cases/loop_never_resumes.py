"""The loop saves, and begins anew each time."""

from __future__ import annotations

import own

from shardwise import Session


def main() -> None:
    with Session(own.config("loop-never-resumes")) as session:
        session.prepare(model=own.model(), data=own.data(), loss=own.loss, valid=own.valid())
        for batch in session.batches():
            if session.step(batch).stopped:
                break
            session.save()


if __name__ == "__main__":
    main()
