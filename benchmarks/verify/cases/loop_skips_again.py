"""After the resume the loop skips as many batches as were trained on, which the cursor has skipped already."""

from __future__ import annotations

import own

from shardwise import Session


def main() -> None:
    with Session(own.config("loop-skips-again")) as session:
        session.prepare(model=own.model(), data=own.data(), loss=own.loss, valid=own.valid())
        session.resume()
        skip = session.steps_done
        for number, batch in enumerate(session.batches()):
            if number < skip:
                continue
            if session.step(batch).stopped:
                break
            session.save()


if __name__ == "__main__":
    main()
