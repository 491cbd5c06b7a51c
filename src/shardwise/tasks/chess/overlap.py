"""What tells games apart: their moves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from shardwise.data.overlap import MOST, NEVER, Contents, SampleContents
from shardwise.tasks.chess.config import ChessData
from shardwise.tasks.chess.games import digests_of, file_digests


def game_contents(train: Sequence[str], valid: Sequence[str], options: ChessData) -> SampleContents:
    held_out = not (options.valid_split if options.source == "hub" else options.valid_paths)
    return SampleContents(
        _contents(train, "training"),
        _contents(valid, "validation"),
        unit="games",
        # Two short games may be equal by chance.
        error_above=NEVER if held_out else MOST,
        held_out=held_out,
        files=[Path(path) for path in (*options.paths, *options.valid_paths)] if options.source == "local" else (),
        file_numbers=np.array(file_digests(train) + ([] if held_out else file_digests(valid)), np.uint64),
    )


def _contents(texts: Sequence[str], part: str) -> Contents:
    def name(place: int) -> str:
        text = " ".join(texts[place].split())
        return f"{part} game {place} ({text[:60]}{'…' if len(text) > 60 else ''})"

    return Contents(digests_of(texts), name)
