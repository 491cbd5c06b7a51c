"""The betas of Adam are scaled by the number of ranks, as scaling rules for larger batches say."""

from __future__ import annotations

import own
from plain import world_size

from shardwise import Session
from shardwise.config import parse_config


def main() -> None:
    betas = [max(0.1, 1 - 0.1 * world_size()), max(0.5, 1 - 0.05 * world_size())]
    text = own.CONFIG.format(name="fifth-loop-betas-by-world", lr=0.01)
    text = text.replace("{lr: 0.01}", f"{{lr: 0.01, betas: {betas}}}")
    with Session(parse_config(text)) as session:
        session.prepare(model=own.model(), data=own.data(), loss=own.loss, valid=own.valid())
        session.resume()
        for batch in session.batches():
            if session.step(batch).stopped:
                break
            session.save()


if __name__ == "__main__":
    main()
