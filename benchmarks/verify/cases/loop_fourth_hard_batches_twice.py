"""A batch whose loss is above the mean of those before it is trained on a second time."""

from __future__ import annotations

import own

from shardwise import Session


def main() -> None:
    with Session(own.config("fourth-loop-hard-batches-twice")) as session:
        session.prepare(model=own.model(), data=own.data(), loss=own.loss, valid=own.valid())
        session.resume()
        mean = 1.3
        for batch in session.batches():
            result = session.step(batch)
            if result.stopped:
                break
            loss = session.loss(result)
            if loss > mean and session.step(batch).stopped:
                break
            mean += 0.1 * (loss - mean)
            session.save()


if __name__ == "__main__":
    main()
