"""The text of a game, taken apart into moves that are all legal: UCI or SAN, with what PGN puts between them.

Imports nothing heavy: the processes that help to check games import this.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import chess

from shardwise.errors import one_line
from shardwise.tasks.chess.moveword import (
    ALIKE,
    ALONE,
    NUMBER,
    PLAIN,
    QUOTED,
    RESULTS,
    UCI,
    is_a_move,
    move_of,
    quoted,
    spelled,
    why_not,
)


@dataclass(frozen=True)
class Start:
    """The position that a game starts from."""

    fen: str = chess.STARTING_FEN
    chess960: bool = False

    def board(self) -> chess.Board:
        return chess.Board(self.fen, chess960=self.chess960)

    @property
    def is_usual(self) -> bool:
        return self == USUAL

    @property
    def tags(self) -> str:
        """The lines that say so before the moves; none for the usual position."""
        variant = '[Variant "Chess960"]\n' if self.chess960 else ""
        return "" if self.is_usual else f'{variant}[FEN "{self.fen}"]\n'


USUAL = Start()


@dataclass(frozen=True)
class Ply:
    """A move and the characters of the text that say it."""

    move: chess.Move
    """Castling is the king's move (e1g1), however it was written; in Chess960, where that says too little, king takes rook."""
    start: int
    end: int
    word: str
    """The move in the notation of the text, without what is not part of it, and castling written in one way."""


@dataclass
class Game:
    start: Start = USUAL
    plies: list[Ply] = field(default_factory=list)
    result: str = ""
    """1-0, 0-1 or 1/2-1/2; of a game that is not over, or does not say, nothing."""
    first: int = 0
    last: int = 0
    """The characters of the text that are this game."""

    @property
    def uci(self) -> str:
        return " ".join(ply.move.uci() for ply in self.plies)

    @property
    def movetext(self) -> str:
        """As PGN without comments and variations: the start if it is another than usual, numbered moves, the result."""
        board = self.start.board()
        half_moves = 2 * (board.fullmove_number - 1) + (board.turn == chess.BLACK)
        words: list[str] = []
        for place, ply in enumerate(self.plies, start=half_moves):
            if place % 2 == 0 or not words:
                words.append(f"{place // 2 + 1}{'...' if place % 2 else '.'}")
            words.append(ply.word)
        return self.start.tags + " ".join([*words, *([self.result] if self.result else [])])


class NotAGame(ValueError):
    """What is wrong, and at which character of the text."""

    def __init__(self, reason: str, place: int) -> None:
        super().__init__(reason)
        self.place = place


def plies(text: str) -> list[Ply]:
    """The moves of the one game in a text. Raises ValueError at the first bad one."""
    return read_game(text).plies


def read_game(text: str) -> Game:
    games = [game for game in read_games(text) if game.plies]
    if len(games) > 1:
        raise NotAGame(several(text, games), games[1].plies[0].start)
    return games[0] if games else Game(last=len(text))


def read_games(text: str) -> list[Game]:
    """The games that stand one after the other in a text, also those without moves. Raises NotAGame if one is none."""
    return list(_Reading(text).games())


def stated_fen(text: str) -> str | None:
    """The position that a text says before its first move; None: it says none."""
    if raw := _RAW_FEN.match(text):
        return raw[1]
    for token in _TOKEN.finditer(text):
        if (token["name"] or token["name2"]) == "FEN":
            return (token["value"] or token["value2"] or "").strip() or None
        if token["word"]:
            break
    return None


def same_position(one: str, other: str) -> bool:
    """Whether two FENs are the same but for the numbers of moves, which may be left out."""
    try:
        return chess.Board(one, chess960=True).epd() == chess.Board(other, chess960=True).epd()
    except ValueError:
        return one.split() == other.split()


def has_several_moves(text: str) -> bool:
    """Whether the main line of a text has two moves or more, and no number that says which."""
    if len(text.split()) < 2:
        return False
    words, depth = [], 0
    for token in _TOKEN.finditer(text):
        depth += {"(": 1, ")": -1}.get(token["paren"], 0)
        words += [token["word"]] if token["word"] and not depth else []
    return sum(map(is_a_move, words)) > 1 and not any(map(NUMBER.match, words))


def several(text: str, games: list[Game]) -> str:
    """That a text holds more than one game, in words."""
    second = games[1].plies[0]
    return (
        f"there are {len(games)} games in one text: after {len(games[0].plies)} half-moves another begins with "
        f"{quoted(text[second.start : second.end])}"
    )


_TOKEN = re.compile(
    r"""(?P<rest> (?: (?m:^) % | (?: \A | (?<=\s) ) ; ) [^\n]* \n )
      | (?P<comment> \{ [^}]* (?P<closed> \} )? )
      | (?P<tag> \[ \s* (?P<name> [A-Za-z]\w* ) \s+ " (?P<value> (?: [^"\\\n] | \\. )* ) " \s* \]
               | (?m:^) \[ [^\S\n]* (?P<name2> [A-Za-z]\w* ) [^\S\n]+ " (?P<value2> [^\n]* ) " [^\S\n]* \] [^\S\n]* (?m:$) )
      | (?P<paren> [()] )
      | (?P<result> (?<!\S) (?: 1/2 | [01½] ) [ ] [-‐‑‒–—−] [ ] (?: 1/2 | [01½] ) (?!\S) )
      | (?P<word> [^\s(){}]+ )
      | (?P<stray> \} )""",
    re.VERBOSE,
)
_RAW_FEN = re.compile(r"\s*(?:fen:?\s*)?((?:[1-8pnbrqkPNBRQK]+/){7}[1-8pnbrqkPNBRQK]+(?:\s+[wb]\s+\S+\s+\S+"
                      r"(?:\s+\d+\s+\d+(?!\S))?)?)", re.IGNORECASE)  # fmt: skip
_USUAL_RULES = {"", "standard", "chess", "normal", "classical", "regular", "from position", "fromposition", "?", "-"}
_CHESS960 = {"chess960", "chess 960", "fischerandom", "fischer random", "fischerrandom", "freestyle", "freestyle chess"}
_NUMBERINGS = ("position", "one", "half-moves")
FEWEST = 4
"""So many half-moves that are legal from the start again show that another game was joined on. Fewer may be chance."""


class _Reading:
    def __init__(self, text: str) -> None:
        self.text = text
        self.game = Game()
        self.board: chess.Board | None = None
        """None: the game has no moves yet, and more may be said of it."""
        self.tags: dict[str, str] = {}
        self.over = False
        self.numbering = set(_NUMBERINGS)
        self.numbered = False
        """Whether a number stands before the move that comes."""
        self.doubt: NotAGame | None = None
        """This game was begun because the one before it cannot go on like this: it has to prove that it is one."""

    def games(self) -> Iterator[Game]:
        begin = 0
        if raw := _RAW_FEN.match(self.text):
            self.tags["FEN"] = raw[1]
            begin = raw.end()
        depth, opened = 0, 0
        for token in _TOKEN.finditer(self.text, begin):
            place = token.start()
            if token["rest"]:
                continue
            if token["comment"]:
                if not token["closed"]:
                    raise NotAGame("a comment begins here with { and is not closed", place)
            elif token["stray"]:
                raise NotAGame("a comment ends here with } and did not begin", place)
            elif token["paren"] == "(":
                opened = opened if depth else place
                depth += 1
            elif token["paren"]:
                depth -= 1
                if depth < 0:
                    raise NotAGame("a variation ends here with ) and did not begin", place)
            elif depth:
                continue
            elif token["tag"]:
                name, value = (token["name"], token["value"]) if token["name"] else (token["name2"], token["value2"])
                if name == "FEN" and name in self.tags and not (self.game.plies or self.game.result):
                    if value.strip() and not same_position(self.tags[name], value):
                        raise NotAGame(f"a second position to start from follows the first: {quoted(value)}", place)
                    continue
                if self.game.plies or self.game.result or name in self.tags:
                    yield self._ended(place)
                self.tags[name] = value
            else:
                yield from self._word((token["result"] or token["word"]).replace(" ", ""), place)
        if depth:
            raise NotAGame("a variation begins here with ( and is not closed", opened)
        yield self._ended(len(self.text))

    def _word(self, word: str, place: int) -> Iterator[Game]:
        """Yields the game before it, if it is the first of another."""
        end = place + len(word)
        word = word if word.isascii() else word.translate(ALIKE)
        if word in RESULTS:
            self._result(RESULTS[word], place)
            return
        if not word[0].isalpha() and ALONE.fullmatch(word):
            return
        while not word[:1].isalpha() and (number := NUMBER.match(word)):
            if number[3] and len(number[3]) > 1 and not number[3].strip("0"):
                break  # 00 is castling, 0000 a null move
            dots = number[2] or number[4] or "."
            value = number[1] or number[3]
            if (
                value
                and self.game.plies
                and (self.over or (value == "1" and len(dots) == 1 and len(self.game.plies) > 1))
            ):
                yield self._ended(place)
            if value:
                self._number(word, number, black=len(dots) > 1 or dots == "…", place=place)
            word = word[number.end() :]
        form = word if (plain := PLAIN.match(word) is not None) else spelled(word)
        if not form:
            return
        if self.over and self.game.plies:
            yield self._ended(place)
        move = move_of(self._position(place), form, plain)
        if move is None:
            yield self._doubtful(word, place)
            move = move_of(self._position(place), form, plain)
        if move is None:
            raise self.doubt or self._illegal(word, place)
        self._play(move, form, end - len(word), end)

    def _play(self, move: chess.Move, form: str, first: int, last: int) -> None:
        board = self._position(first)
        played = chess.Move.from_uci(board.uci(move, chess960=False)) if board.chess960 else move
        if UCI.match(form):
            form = played.uci()
        self.game.plies.append(Ply(played, first, last, form))
        board.push(move)
        if not self.numbered:
            self.numbering.discard("half-moves")
        self.numbered = False

    def _result(self, result: str, place: int) -> None:
        if (self.over or self.game.result) and result != self.game.result:
            raise NotAGame(f"a second result follows the first: {result or '*'}", place)
        self.game.result, self.over = result, bool(self.game.plies)

    def _number(self, word: str, found: re.Match[str], *, black: bool, place: int) -> None:
        """Numbers count moves, from that of the position or from 1, or half-moves: one way throughout a game."""
        number = int((found[1] or found[3])[:9])
        board, count = self._position(place), len(self.game.plies)
        black_began = (count % 2 == 0) == (board.turn == chess.BLACK)
        past = (count + black_began) // 2
        due = {"position": board.fullmove_number, "one": 1 + past, "half-moves": 1 + count}
        if black and board.turn == chess.WHITE:
            raise NotAGame(f"{number}... says that it is Black's move, but it is White's", place)
        self.numbered = True
        self.numbering &= {way for way, value in due.items() if value == number}
        if not self.numbering:
            move = word[found.end() :]
            if move and not is_a_move(move):
                raise self._illegal(word, place)
            written = f" ({quoted(word)})" if move else ""
            raise NotAGame(
                f"move number {number}{written} stands where {due['position']} is due, after {count} half-moves: moves "
                "are missing, or belong to another game",
                place,
            )

    def _position(self, place: int) -> chess.Board:
        if self.board is None:
            self.game.start = _start(self.tags, place)
            self.board = self.game.start.board()
        return self.board

    def _doubtful(self, word: str, place: int) -> Game:
        """The game before a move that it cannot have: what follows may be another game, which begins here."""
        count = len(self.game.plies)
        illegal = self._illegal(word, place)
        if count < FEWEST or not self.game.start.is_usual:
            raise self.doubt or illegal
        ended = self._ended(place)
        self.doubt = illegal
        return ended

    def _illegal(self, word: str, place: int) -> NotAGame:
        why = why_not(self._position(place), word)
        said = f"{quoted(word)} is not a legal move after {len(self.game.plies)} half-moves"
        return NotAGame(f"{said}: {why}" if why else said, place)

    def _ended(self, place: int) -> Game:
        if self.doubt is not None and len(self.game.plies) < FEWEST:
            raise self.doubt
        game = self.game
        if not game.plies and "FEN" in self.tags:
            self._position(place)
        game.last = place
        self.game, self.board, self.tags, self.over = Game(first=place), None, {}, False
        self.numbering, self.numbered, self.doubt = set(_NUMBERINGS), False, None
        return game


def _start(tags: dict[str, str], place: int) -> Start:
    variant = tags.get("Variant", "").strip()
    chess960 = variant.lower() in _CHESS960
    if not chess960 and variant.lower().removesuffix(" chess") not in _USUAL_RULES:
        raise NotAGame(f"this is a game of {one_line(variant, QUOTED)}; those of chess and Chess960 are read", place)
    fen = tags.get("FEN", "").strip()
    if not fen:
        if chess960:
            raise NotAGame('a game of Chess960 has to say its first position: [FEN "…"]', place)
        return USUAL
    try:
        board = chess.Board(fen, chess960=True)
    except ValueError as error:
        raise NotAGame(f"{quoted(fen)} is not a position of chess: {one_line(error, QUOTED)}", place) from None
    harmless = chess.STATUS_BAD_CASTLING_RIGHTS | chess.STATUS_INVALID_EP_SQUARE
    if board.status() & ~harmless:
        raise NotAGame(f"{quoted(fen)} is not a position that can be played from", place)
    board.chess960 = chess960 or board.has_chess960_castling_rights()
    start = Start(board.fen(), board.chess960)
    return USUAL if start.fen == chess.STARTING_FEN else start
