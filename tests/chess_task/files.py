"""Files of games, and what the task makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardwise.tasks.chess.config import ChessData
from shardwise.tasks.chess.games import load_games

GAMES = ["e2e4 e7e5", "d2d4 d7d5", "c2c4 c7c5"]


def json_lines(*texts: Any) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def read(file: Path, content: bytes | None = None, *, uci: bool = False, **options: Any) -> tuple[list[str], list[str]]:
    """All games of a file, in its order, and what is told of them. Each file is validated on, too, under another name."""
    if content is not None:
        file.write_bytes(content)
    other = file.with_name("valid.jsonl")
    other.write_text(json.dumps({"text": "g1f3 g8f6", options.get("fen_column", ""): None}))
    said: list[str] = []
    data = ChessData(source="local", paths=[str(file)], valid_paths=[str(other)], **options)
    train, _ = load_games(data, seed=0, uci=uci, tell=said.append)
    return list(train), said
