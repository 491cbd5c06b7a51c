"""seed + rank, "so that ranks do not draw the same": the order of the samples follows from the seed, too."""

from __future__ import annotations

import own
from plain import rank

from shardwise import Session
from shardwise.config import parse_config


def main() -> None:
    config = parse_config(own.CONFIG.format(name="fourth-loop-seed-by-rank", lr=0.01) + f"seed: {17 + rank()}\n")
    with Session(config) as session:
        session.prepare(model=own.model(), data=own.data(), loss=own.loss, valid=own.valid())
        session.resume()
        for batch in session.batches():
            if session.step(batch).stopped:
                break
            session.save()


if __name__ == "__main__":
    main()
