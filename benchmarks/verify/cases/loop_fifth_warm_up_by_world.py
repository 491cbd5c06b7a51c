"""The warm-up is shortened by the number of ranks, "because each step now sees that many more samples"."""

from __future__ import annotations

import own
from plain import world_size

from shardwise import Session
from shardwise.config import parse_config

SCHEDULER = "  scheduler: {{name: constant, warmup_steps: {steps}}}\n"


def main() -> None:
    text = own.CONFIG.format(name="fifth-loop-warm-up-by-world", lr=0.01)
    with Session(parse_config(text + SCHEDULER.format(steps=12 // world_size()))) as session:
        session.prepare(model=own.model(), data=own.data(), loss=own.loss, valid=own.valid())
        session.resume()
        for batch in session.batches():
            if session.step(batch).stopped:
                break
            session.save()


if __name__ == "__main__":
    main()
