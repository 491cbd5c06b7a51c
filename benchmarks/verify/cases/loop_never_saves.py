"""The loop never saves."""

from __future__ import annotations

import own

from shardwise import Session


def main() -> None:
    with Session(own.config("loop-never-saves")) as session:
        session.prepare(model=own.model(), data=own.data(), loss=own.loss, valid=own.valid())
        session.resume()
        for batch in session.batches():
            if session.step(batch).stopped:
                break


if __name__ == "__main__":
    main()
