"""The games to train and to validate on: made from a seed, or read from files and data sets and checked."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import chess
import numpy as np
from numpy.typing import NDArray

from shardwise.data.cache import cache_folder, made_once
from shardwise.data.holdout import copies_together, hold_out
from shardwise.data.hub import load_split, require_column
from shardwise.errors import DataError
from shardwise.tasks.chess.config import ChessData
from shardwise.tasks.chess.examine import Text
from shardwise.tasks.chess.files import GamesFile, text_of
from shardwise.tasks.chess.kept import Facts, KeptGames, Source, keep_games

if TYPE_CHECKING:
    from datasets import Dataset

Tell = Callable[[str], object]


def load_games(
    options: ChessData, seed: int, *, uci: bool = False, tell: Tell | None = None
) -> tuple[Sequence[str], Sequence[str]]:
    """Training and validation texts, each of them one legal game.

    `uci`: the moves are enough, in UCI. `tell`: hears what a person should know of the data; without it, that is known already.
    """
    if options.source == "synthetic":
        return _split(_random_games(seed, options.num_games, options.max_plies), options.valid_fraction, seed)
    if options.source == "local":
        sources = _local(options, "paths")
        held_out = _local(options, "valid_paths")
    else:
        sources = [_hub(options, options.split)]
        held_out = [_hub(options, options.valid_split)] if options.valid_split else []
    games = _checked(sources, options, uci=uci, tell=tell)
    if held_out:
        return games, _checked(held_out, options, uci=uci, tell=tell)
    return _split(games, options.valid_fraction, seed)


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


def _local(options: ChessData, key: str) -> list[Source]:
    if address := next((path for path in getattr(options, key) if "://" in path), None):
        raise DataError(f"data.{key}: {address} is an address: download it first, and name the file")
    paths = [Path(path) for path in getattr(options, key)]
    real = [os.path.realpath(path) for path in paths]  # not Path.resolve: it fails at links that go in a circle
    if twice := [path for path, place in zip(paths, real, strict=True) if real.count(place) > 1]:
        raise DataError(f"data.{key} names {twice[0]} twice: its games would count twice")
    if key == "valid_paths":
        trained_on = {os.path.realpath(path) for path in options.paths}
        if both := [path for path, place in zip(paths, real, strict=True) if place in trained_on]:
            raise DataError(
                f"{both[0]} is in data.paths and in data.valid_paths: it would be validated on what it trained on"
            )
    return [GamesFile(path, f"data.{key}", options.text_column, options.fen_column) for path in paths]


def _hub(options: ChessData, split: str) -> Source:
    dataset = load_split(str(options.dataset), split, extra="lm")
    require_column(dataset, str(options.dataset), "text_column", options.text_column)
    if options.fen_column is not None:
        require_column(dataset, str(options.dataset), "fen_column", options.fen_column)
    return _Rows(dataset, f"{options.dataset} ({split})", options.text_column, options.fen_column)


class _Rows:
    """Two columns of a Hugging Face data set: the games, and where they start from."""

    unit, is_pgn = "row", False

    def __init__(self, dataset: Dataset, name: str, column: str, fen_column: str | None) -> None:
        self.dataset, self.name, self.column, self.fen_column = dataset, name, column, fen_column
        self._read = 0

    def stamp(self) -> list[Any]:
        return [self.dataset._fingerprint, len(self.dataset), self.column, self.fen_column]

    def share_read(self) -> float:
        return self._read / max(1, len(self.dataset))

    def texts(self) -> Iterator[Text]:
        columns = [self.column, *([self.fen_column] if self.fen_column else [])]
        for part in self.dataset.select_columns(columns).iter(batch_size=1000):
            fens = part[self.fen_column] if self.fen_column else [None] * len(part[self.column])
            for value, fen in zip(part[self.column], fens, strict=True):
                where = f"{self.name}, row {self._read}"
                yield Text(self._read, text_of(value, fen, where, self.column, self.fen_column))
                self._read += 1


def _checked(sources: list[Source], options: ChessData, *, uci: bool, tell: Tell | None) -> _Joined:
    """All games that can be trained on. What cannot be is an error, or left out and told, as the config says."""
    parts = [keep_games(source, uci=uci, whole=tell is not None) for source in sources]
    facts = Facts()
    for part in parts:
        facts.add(part.facts)
    if facts.illegal and options.illegal_games == "error":
        raise DataError(
            f"{_share(facts.illegal, facts.texts, 'is no game', 'are no games')} of legal moves:"
            f"{_listed(facts.first_illegal, facts.illegal)}\nMend or remove them, or leave them out: data.illegal_games: skip"
        )
    if facts.joined and options.joined_games == "error":
        raise DataError(
            f"{_share(facts.joined, facts.texts, 'holds', 'hold')} more than one game:"
            f"{_listed(facts.first_joined, facts.joined)}\nWrite each on a line of its own, or have them taken apart: "
            "data.joined_games: split"
        )
    games = _Joined(parts)
    if tell is not None:
        _tell_of(facts, tell, uci)
    if not len(games):
        names = ", ".join(source.name for source in sources)
        illegal = (
            f": {_share(facts.illegal, facts.texts, 'is no game', 'are no games')} of legal moves"
            if facts.illegal
            else ""
        )
        empty = f": {_share(facts.empty, facts.texts, 'holds', 'hold')} no move" if facts.empty else ""
        raise DataError(f"no games in {names}{illegal or empty}")
    return games


def _tell_of(facts: Facts, tell: Tell, uci: bool) -> None:
    if facts.illegal:
        are = _share(facts.illegal, facts.texts, "is left out, being no game", "are left out, being no games")
        tell(f"{are} of legal moves (data.illegal_games: skip). The first: {facts.first_illegal[0]}")
    if facts.joined:
        hold = _share(facts.joined, facts.texts, "holds", "hold")
        tell(
            f"{hold} more than one game: they are taken apart (data.joined_games: split). The first: {facts.first_joined[0]}"
        )
    if facts.empty:
        tell(
            f"{_share(facts.empty, facts.texts, 'holds', 'hold')} no move: left out. The first: {facts.first_empty[0]}"
        )
    if facts.other_starts and uci:
        start = "starts" if facts.other_starts == 1 else "start"
        tell(
            f"{facts.other_starts:,} of the games {start} from a position of their own. With tokenizer.strategy: moves the "
            "model is given their moves alone, and not the position"
        )


def _share(part: int, of: int, one: str, several: str) -> str:
    return f"{part:,} of {of:,} texts {one if part == 1 else several}"


def _listed(first: list[str], number: int) -> str:
    more = f"\n  and {number - len(first):,} more" if number > len(first) else ""
    return "".join(f"\n  {each}" for each in first) + more


class _Joined(Sequence[str]):
    """The games of several files, one after the other."""

    def __init__(self, parts: Sequence[KeptGames]) -> None:
        self.parts = parts
        self.ends = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        if not 0 <= index < len(self):
            raise IndexError(index)
        part = int(np.searchsorted(self.ends, index, side="right"))
        return self.parts[part][index - int(self.ends[part]) + len(self.parts[part])]

    @property
    def digests(self) -> NDArray[np.uint64]:
        return np.concatenate([part.digests for part in self.parts])


def digests_of(texts: Sequence[str]) -> NDArray[np.uint64]:
    """A number for each game: of its moves where they were checked, else of its text. Equal games have equal ones."""
    if isinstance(texts, _Subset):
        return digests_of(texts.texts)[texts.indices]
    if isinstance(texts, _Joined | KeptGames):
        return texts.digests
    # Python's own hash: the fastest there is, and nothing of it leaves this process.
    return np.array([hash(text) % 2**64 for text in texts], np.uint64)


def file_digests(texts: Sequence[str]) -> list[int]:
    """A number for each file: the same for the same games in the same order, compressed or in another notation too."""
    joined = texts.texts if isinstance(texts, _Subset) else texts
    parts = joined.parts if isinstance(joined, _Joined) else []
    digests = (hashlib.blake2b(part.digests.tobytes() or str(part.folder).encode(), digest_size=8) for part in parts)
    return [int.from_bytes(digest.digest()) for digest in digests]


class _Subset(Sequence[str]):
    def __init__(self, texts: Sequence[str], indices: np.ndarray) -> None:
        self.texts, self.indices = texts, indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return self.texts[int(self.indices[index])]


def _split(texts: Sequence[str], valid_fraction: float, seed: int) -> tuple[_Subset, _Subset]:
    if len(texts) < 2:
        raise DataError("one game cannot be split into training and validation: give more, or data.valid_paths")
    kept, held_out = hold_out(len(texts), valid_fraction, seed)
    kept, held_out = copies_together(kept, held_out, digests_of(texts).tolist())
    return _Subset(texts, kept), _Subset(texts, held_out)
