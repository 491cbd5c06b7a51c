"""The loop leaves out every fourth batch, "to look at later": samples are never trained on, and other ones after a resume."""

from __future__ import annotations

import own

from shardwise import Session


def main() -> None:
    with Session(own.config("third-loop-every-fourth-left-out")) as session:
        session.prepare(model=own.model(), data=own.data(), loss=own.loss, valid=own.valid())
        session.resume()
        for place, batch in enumerate(session.batches()):
            if place % 4 == 3:
                continue
            if session.step(batch).stopped:
                break
            session.save()


if __name__ == "__main__":
    main()
