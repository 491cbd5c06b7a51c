"""Epochs are multiplied by the number of ranks, "since each of them sees only its share": the rate falls more slowly."""

from __future__ import annotations

import own
from plain import world_size

from shardwise import Session
from shardwise.config import parse_config


def main() -> None:
    text = own.CONFIG.format(name="fourth-loop-epochs-by-world", lr=0.01)
    config = parse_config(text.replace("max_epochs: 3", f"max_epochs: {3 * world_size()}"))
    with Session(config) as session:
        session.prepare(model=own.model(), data=own.data(), loss=own.loss, valid=own.valid())
        session.resume()
        for batch in session.batches():
            if session.step(batch).stopped:
                break
            session.save()


if __name__ == "__main__":
    main()
