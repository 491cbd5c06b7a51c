"""Games of chess as text: made from a seed, read from files, and taken apart into moves."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import chess
import numpy as np

from shardwise.data.cache import cache_folder, made_once
from shardwise.data.holdout import copies_together, hold_out
from shardwise.data.hub import load_split, require_column
from shardwise.errors import DataError
from shardwise.tasks.chess.config import ChessData

if TYPE_CHECKING:
    from datasets import Dataset


def load_games(options: ChessData, seed: int) -> tuple[Sequence[str], Sequence[str]]:
    """Training and validation texts. No game is in both."""
    if options.source == "synthetic":
        texts: Sequence[str] = _random_games(seed, options.num_games, options.max_plies)
        held_out: Sequence[str] | None = None
    elif options.source == "local":
        texts = _read_files(options.paths, options.text_column)
        held_out = _read_files(options.valid_paths, options.text_column) if options.valid_paths else None
    else:
        texts = _read_hub(options, options.split)
        held_out = _read_hub(options, options.valid_split) if options.valid_split else None
    if held_out is not None:
        return texts, held_out
    return _split(texts, options.valid_fraction, seed)


def _random_games(seed: int, number: int, max_plies: int) -> list[str]:
    """Made once, and kept: a run that starts again does not play them again."""
    file = cache_folder() / "synthetic" / f"chess-{chess.__version__}-{seed}-{number}-{max_plies}.txt"

    def play(aside: Path) -> None:
        aside.write_text("\n".join(random_game(seed, index, max_plies) for index in range(number)))

    games = made_once(file, play).read_text().split("\n")
    if len(games) != number:  # cut short, by a machine that went down
        file.unlink()
        games = made_once(file, play).read_text().split("\n")
    return games


def random_game(seed: int, index: int, max_plies: int) -> str:
    """A legal game of uniformly random moves, in UCI notation."""
    choose = random.Random(f"{seed}/{index}").choice
    board = chess.Board()
    moves: list[str] = []
    while len(moves) < max_plies and (legal := list(board.legal_moves)):
        move = choose(legal)
        moves.append(move.uci())
        board.push(move)
    return " ".join(moves)


@dataclass(frozen=True)
class Ply:
    """A move and the characters of the text that say it."""

    move: chess.Move
    start: int
    end: int


_WORD = re.compile(r"\S+")
_MOVE_NUMBER = re.compile(r"^\d+\.+")
_NOT_MOVES = {"", "1-0", "0-1", "1/2-1/2", "*"}


def plies(text: str) -> list[Ply]:
    """The moves of a game in UCI or SAN, with or without move numbers. Raises ValueError at the first bad one."""
    board = chess.Board()
    found: list[Ply] = []
    for match in _WORD.finditer(text):
        number = _MOVE_NUMBER.match(match.group())
        start = match.start() + (number.end() if number else 0)
        word = text[start : match.end()]
        if word in _NOT_MOVES:
            continue
        move = read_move(board, word)
        if move is None:
            raise ValueError(f"{word!r} is not a legal move after {len(found)} half-moves")
        found.append(Ply(move, start, match.end()))
        board.push(move)
    return found


def read_move(board: chess.Board, word: str) -> chess.Move | None:
    """The legal move that a word says, in UCI or SAN; None if it says none."""
    try:
        return board.parse_uci(word)
    except ValueError:
        pass
    try:
        return board.parse_san(word)
    except ValueError:
        return None


def first_move_of(text: str) -> str:
    """The first word of a continuation that could be a move."""
    for match in _WORD.finditer(text):
        word = _MOVE_NUMBER.sub("", match.group())
        if word not in _NOT_MOVES:
            return word
    return ""


def _read_files(paths: list[str], column: str) -> list[str]:
    texts: list[str] = []
    for path in paths:
        file = Path(path)
        if not file.is_file():
            raise DataError(f"data.paths: there is no file {file}")
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError as error:
            raise DataError(f"{file} is not a text file in UTF-8: {error.reason} at byte {error.start}") from None
        for number, line in enumerate(lines, start=1):
            if line.strip():
                texts.append(_text_of(line, column, f"{file}, line {number}"))
    if not texts:
        raise DataError(f"data.paths: no games in {', '.join(paths)}")
    return texts


def _text_of(line: str, column: str, where: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(
            f'{where}: not valid JSON ({error.msg}); each line is an object like {{"{column}": …}}'
        ) from None
    text = record.get(column) if isinstance(record, dict) else None
    if not isinstance(text, str) or not text.strip():
        keys = ", ".join(record) if isinstance(record, dict) else type(record).__name__
        raise DataError(f"{where}: no text under {column!r} (found: {keys}); data.text_column names the key")
    return text


class _Column(Sequence[str]):
    """A column of a Hugging Face data set, read as it is needed. A list of moves becomes a text."""

    def __init__(self, dataset: Dataset, column: str) -> None:
        self.dataset, self.column = dataset, column

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        value = self.dataset[int(index)][self.column]
        return value if isinstance(value, str) else " ".join(value)


def _read_hub(options: ChessData, split: str) -> Sequence[str]:
    dataset = load_split(str(options.dataset), split, extra="lm")
    require_column(dataset, str(options.dataset), "text_column", options.text_column)
    return _Column(dataset, options.text_column)


class _Subset(Sequence[str]):
    def __init__(self, texts: Sequence[str], indices: np.ndarray) -> None:
        self.texts, self.indices = texts, indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return self.texts[int(self.indices[index])]


def _split(texts: Sequence[str], valid_fraction: float, seed: int) -> tuple[Sequence[str], Sequence[str]]:
    if len(texts) < 2:
        raise DataError("one game cannot be split into training and validation: give more, or data.valid_paths")
    kept, held_out = hold_out(len(texts), valid_fraction, seed)
    if isinstance(texts, list):  # all of a hub's data set would have to be read
        kept, held_out = copies_together(kept, held_out, texts)
    return _Subset(texts, kept), _Subset(texts, held_out)
