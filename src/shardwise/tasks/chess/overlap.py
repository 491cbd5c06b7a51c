"""What tells games apart: their text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.data.overlap import MOST, NEVER, Contents, SampleContents
from shardwise.tasks.chess.config import ChessData

AT_MOST = 500_000
"""Games of each part that are compared: of more, so many that are spread evenly. It takes a second or two."""
_AT_ONCE = 10_000


def game_contents(train: Sequence[str], valid: Sequence[str], options: ChessData) -> SampleContents:
    held_out = not (options.valid_split if options.source == "hub" else options.valid_paths)
    some = max(len(train), len(valid)) > AT_MOST
    return SampleContents(
        _contents(train, "training"),
        _contents(valid, "validation"),
        unit="games",
        # Two short games may be equal by chance.
        error_above=NEVER if held_out else MOST,
        held_out=held_out,
        files=[Path(path) for path in (*options.paths, *options.valid_paths)] if options.source == "local" else (),
        looked_at=f" (at most {AT_MOST} games of each part were compared)" if some else "",
    )


def _contents(texts: Sequence[str], part: str) -> Contents:
    places = np.linspace(0, len(texts) - 1, min(len(texts), AT_MOST)).astype(np.int64)
    numbers = np.empty(len(places), np.uint64)
    for start in range(0, len(places), _AT_ONCE):
        some = places[start : start + _AT_ONCE]
        # Python's own hash: the fastest there is, and nothing of it leaves this process.
        numbers[start : start + len(some)] = [hash(text.strip()) % 2**64 for text in texts_at(texts, some)]

    def name(place: int) -> str:
        text = " ".join(texts[int(places[place])].split())
        return f"{part} game {places[place]} ({text[:60]}{'…' if len(text) > 60 else ''})"

    return Contents(numbers, name)


def texts_at(texts: Any, places: np.ndarray) -> Sequence[str]:
    """Many at once: a column of a Hugging Face data set takes a hundred times as long one by one."""
    while hasattr(texts, "indices"):
        texts, places = texts.texts, texts.indices[places]
    if hasattr(texts, "dataset"):
        values = texts.dataset.select_columns([texts.column])[places.tolist()][texts.column]
        return [value if isinstance(value, str) else " ".join(value) for value in values]
    return [texts[place] for place in places.tolist()]
