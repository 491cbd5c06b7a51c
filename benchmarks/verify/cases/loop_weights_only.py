"""The loop keeps the weights by itself and loads them alone: no moments, no cursor, no schedule."""

from __future__ import annotations

import os
from pathlib import Path

import own
import torch

from shardwise import Session


def session_folder() -> str:
    return os.environ.get("OWN_WEIGHTS", ".")


def main() -> None:
    kept = Path(session_folder()) / "weights.pt"
    with Session(own.config("loop-weights-only")) as session:
        model = own.model()
        if kept.exists():
            model.load_state_dict(torch.load(kept))
        session.prepare(model=model, data=own.data(), loss=own.loss)
        for batch in session.batches():
            if session.step(batch).stopped:
                break
            if session.world.is_first:
                torch.save(model.state_dict(), kept)


if __name__ == "__main__":
    main()
