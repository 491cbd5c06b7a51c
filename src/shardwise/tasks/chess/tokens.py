"""Games as token numbers: one token per move, or the tokenizer that a pretrained model brings."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import chess

from shardwise.errors import DataError, MissingExtra
from shardwise.tasks.chess.config import ChessModel, ChessTokenizer
from shardwise.tasks.chess.movetext import USUAL, Start, read_game
from shardwise.tasks.chess.moveword import first_move_of


@dataclass(frozen=True)
class Encoded:
    """A game's tokens and, when asked for, its moves with the range of tokens that says each."""

    ids: list[int]
    moves: list[chess.Move]
    spans: list[tuple[int, int]]
    with_moves: bool = False
    """Whether they were asked for: the game is to be evaluated, not trained on."""
    start: Start = USUAL
    """Where the moves start from, if they were asked for."""


class GameTokenizer(Protocol):
    pad_id: int
    bos_id: int | None
    eos_id: int | None
    size: int
    tokens_per_move: int
    """How many tokens a move takes at most: so many are decoded to learn the model's first choice."""

    def encode(self, text: str, *, with_moves: bool) -> Encoded: ...
    def move_word(self, ids: list[int]) -> str:
        """The move that a continuation begins with."""
        ...

    def lengths(self, texts: Iterable[str]) -> list[int]:
        """How many tokens each of these texts would be."""
        ...

    def save(self, folder: Path) -> None: ...


def build_tokenizer(options: ChessTokenizer, model: ChessModel) -> GameTokenizer:
    strategy = options.strategy or ("pretrained" if model.name else "moves")
    if strategy == "moves":
        return MoveTokenizer()
    name = options.name or model.name
    if name is None:
        raise DataError("tokenizer.strategy: pretrained needs tokenizer.name or model.name")
    return PretrainedTokenizer(name)


class MoveTokenizer:
    """Every move that a piece could make on an empty board is one token: 1968 of them, and three special ones."""

    pad_id: int = 0
    bos_id: int | None = 1
    eos_id: int | None = 2
    tokens_per_move = 1

    def __init__(self) -> None:
        self.words = ["<pad>", "<bos>", "<eos>", *_every_uci_move()]
        self.size = len(self.words)
        self._ids = {word: index for index, word in enumerate(self.words)}
        self._moves = {word: index for word, index in self._ids.items() if not word.startswith("<")}

    def encode(self, text: str, *, with_moves: bool) -> Encoded:
        if not with_moves and (numbers := self._without_a_board(text)) is not None:
            return Encoded(self._between(numbers), [], [])
        game = read_game(text)
        moves = [ply.move for ply in game.plies]
        ids = self._between([self._moves[move.uci()] for move in moves])
        if not with_moves:
            return Encoded(ids, [], [])
        return Encoded(ids, moves, [(place + 1, place + 2) for place in range(len(moves))], True, game.start)

    def _without_a_board(self, text: str) -> list[int] | None:
        """The moves of a legal game in UCI, without playing them, which takes a hundred times as long. None: it takes a board."""
        fen = _FEN.match(text)
        words = text[fen.end() :].split() if fen else text.split()
        numbers = list(map(self._moves.get, words))
        if None in numbers:
            return None
        if not _ROOK_TAKEN.keys().isdisjoint(words):
            if fen:
                return None
            for square in ("e1", "e8"):
                # A king that has not left its square cannot go that far, and one that has left it cannot castle.
                first = next((place for place, word in enumerate(words) if word.startswith(square)), None)
                if first is not None and (castling := _ROOK_TAKEN.get(words[first])):
                    numbers[first] = self._moves[castling]
        return cast(list[int], numbers)

    def _between(self, numbers: list[int]) -> list[Any]:
        return [self.bos_id, *numbers, self.eos_id]

    def lengths(self, texts: Iterable[str]) -> list[int]:
        """Without a look at what the moves are: in UCI, words are moves."""
        return [
            text.count(" ") + 3 if text[:1] != "[" else len(self.encode(text, with_moves=False).ids) for text in texts
        ]

    def move_word(self, ids: list[int]) -> str:
        return self.words[ids[0]]

    def save(self, folder: Path) -> None:
        """As a Hugging Face tokenizer, so that the exported model is usable without shardwise."""
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel
        from tokenizers.pre_tokenizers import WhitespaceSplit
        from tokenizers.processors import TemplateProcessing
        from transformers import PreTrainedTokenizerFast

        fast = Tokenizer(WordLevel(self._ids, unk_token="<pad>"))
        fast.pre_tokenizer = WhitespaceSplit()
        fast.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", self.bos_id)])
        PreTrainedTokenizerFast(
            tokenizer_object=fast, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
        ).save_pretrained(folder)


class PretrainedTokenizer:
    tokens_per_move = 8

    def __init__(self, name: str) -> None:
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise MissingExtra.of("transformers", "lm", "tokenizer.strategy: pretrained") from None
        try:
            self.inner: Any = AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError, json.JSONDecodeError) as error:
            raise DataError(f"the tokenizer of {name!r} cannot be loaded: {str(error).splitlines()[0]}") from error
        if not self.inner.is_fast:
            raise DataError(f"the tokenizer of {name!r} has no fast version, which is needed to find moves in tokens")
        self.size = len(self.inner)
        self.bos_id: int | None = self.inner.bos_token_id
        self.eos_id: int | None = self.inner.eos_token_id
        # Padding is never seen: the loss skips it and causal attention never looks right.
        self.pad_id = self.inner.pad_token_id or 0

    def encode(self, text: str, *, with_moves: bool) -> Encoded:
        encoded = self.inner(text, return_offsets_mapping=with_moves)
        ids: list[int] = list(encoded["input_ids"])
        if self.eos_id is not None and ids[-1:] != [self.eos_id]:
            ids.append(self.eos_id)
        if not with_moves:
            return Encoded(ids, [], [])
        game = read_game(text)
        offsets = encoded["offset_mapping"]
        spans = [_tokens_over(offsets, ply.start, ply.end) for ply in game.plies]
        return Encoded(ids, [ply.move for ply in game.plies], spans, with_moves, game.start)

    def lengths(self, texts: Iterable[str]) -> list[int]:
        # One after the other: several at once would be done by threads, which a loader's workers cannot be forked from.
        return [len(self.encode(text, with_moves=False).ids) for text in texts]

    def unknown_share(self, texts: Iterable[str]) -> float:
        """Of the tokens of these texts, those that stand for what the tokenizer does not know."""
        # Some write padding for it. What a text may begin or end with is not that.
        unknown = {self.inner.unk_token_id, self.inner.pad_token_id} - {self.bos_id, self.eos_id}
        ids = [number for text in texts for number in self.encode(text, with_moves=False).ids]
        return sum(number in unknown for number in ids) / max(1, len(ids))

    def move_word(self, ids: list[int]) -> str:
        return first_move_of(self.inner.decode(ids, skip_special_tokens=True))

    def save(self, folder: Path) -> None:
        self.inner.save_pretrained(folder)


_ROOK_TAKEN = {"e1h1": "e1g1", "e1a1": "e1c1", "e8h8": "e8g8", "e8a8": "e8c8"}
"""What castling is also written as, a king that takes its own rook, and the king's move. Or it is a rook's move."""
_FEN = re.compile(r'\[FEN "[^"\n]*"\]\n')
"""The line before the moves of a game that has another start than the usual one."""


def _every_uci_move() -> list[str]:
    moves = []
    for start in chess.SQUARES:
        reach = chess.BB_RANK_ATTACKS[start][0] | chess.BB_FILE_ATTACKS[start][0] | chess.BB_DIAG_ATTACKS[start][0]
        for end in chess.SquareSet(reach | chess.BB_KNIGHT_ATTACKS[start]):
            moves.append(chess.Move(start, end))
            forward = (chess.square_rank(start), chess.square_rank(end)) in ((6, 7), (1, 0))
            if forward and chess.square_distance(start, end) == 1:
                pieces = (chess.QUEEN, chess.ROOK, chess.BISHOP, chess.KNIGHT)
                moves.extend(chess.Move(start, end, promotion=piece) for piece in pieces)
    return sorted(move.uci() for move in moves)


def _tokens_over(offsets: list[tuple[int, int]], start: int, end: int) -> tuple[int, int]:
    """The range of tokens that overlap the characters [start, end)."""
    touching = [index for index, (first, last) in enumerate(offsets) if first < end and last > start]
    return (touching[0], touching[-1] + 1) if touching else (0, 0)
