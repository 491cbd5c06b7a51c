"""Whether texts are games: every move is played on a board, by several processes where there is much to do.

Imports nothing heavy: those processes import it too.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from types import TracebackType
from typing import Any

from shardwise.tasks.chess.movetext import Game, NotAGame, read_games, several
from shardwise.tasks.chess.moveword import ALIKE, CASTLES, UCI, castled

AT_ONCE = 128
"""Texts that are handed over together: a few tenths of a second of work."""
ALONE = 8
"""So many of those one process does alone: starting another would take longer."""
MOST_HELPERS = 31


@dataclass(frozen=True)
class Good:
    """A game as it is kept."""

    text: str
    digest: int
    """Of start and moves: the same for the same game, however it was written."""
    usual_start: bool


@dataclass(frozen=True)
class Found:
    """What a text turned out to be."""

    games: list[Good]
    empty: bool = False
    """There is no move in it."""
    problem: str = ""
    """Why it is none; then it has no games."""
    line: int = 0
    """Where in the text the problem is, from 0."""
    joined: str = ""
    """That it holds more games than one, where one was expected."""


@dataclass(frozen=True)
class Text:
    """A text that may be a game, and where it stands."""

    line: int
    """From 1; of a data set, the row, from 0."""
    text: str
    problem: str = ""
    """Why it is no game, where the file shows that already."""


@dataclass(frozen=True)
class Wish:
    """How a game is to be kept."""

    uci: bool
    """The moves alone, in UCI. Else as it was written; of PGN, numbered moves without comments and variations."""
    pgn: bool
    """The texts come from a PGN file, where games may follow each other."""


def examine(text: str, wish: Wish) -> Found:
    try:
        text.encode()
        games = read_games(text)
    except UnicodeEncodeError as error:
        return Found([], problem=f"half a character ({error.object[error.start]!r}) is no text")
    except NotAGame as error:
        return Found([], problem=str(error), line=text.count("\n", 0, error.place))
    played = [game for game in games if game.plies]
    # In a PGN file, what stands between two games may be a comment alone.
    empty = not played and not (wish.pgn and not _says_something(text, games))
    joined = several(text, played) if len(played) > 1 and not wish.pgn else ""
    return Found([_kept(text, game, wish, whole=len(played) == 1) for game in played], empty, joined=joined)


def _says_something(text: str, games: list[Game]) -> bool:
    return "[" in text or any(game.result for game in games)


def _kept(text: str, game: Game, wish: Wish, *, whole: bool) -> Good:
    moves = game.start.tags + game.uci
    if wish.uci:
        kept = moves
    elif wish.pgn:
        kept = game.movetext
    else:
        kept = (
            _as_written(text, game, 0, len(text)) if whole else _as_written(text, game, game.first, game.last).strip()
        )
    digest = int.from_bytes(hashlib.blake2b(moves.encode(), digest_size=8).digest())
    return Good(kept, digest, game.start.is_usual)


def _as_written(text: str, game: Game, first: int, last: int) -> str:
    """Castling and moves in UCI in one way, or the same move would be other tokens here and there."""
    parts: list[str] = []
    for ply in game.plies:
        word = text[ply.start : ply.end].translate(ALIKE)
        if UCI.match(word):
            word = ply.word
        elif castles := CASTLES.match(word):
            word = castled(castles) + word[castles.end() :]
        parts += [text[first : ply.start], word]
        first = ply.end
    return "".join([*parts, text[first:last]])


def examine_all(texts: Iterable[Text], wish: Wish) -> Iterator[tuple[Text, Found]]:
    """What each text is, in their order. Stops its helpers when it is closed, also by an error."""
    left = iter(texts)
    batches = iter(lambda: list(islice(left, AT_ONCE)), [])
    waiting: deque[tuple[list[Text], Future[list[Found]]]] = deque()
    with _Helpers(wish) as helpers:
        for number, batch in enumerate(batches):
            # This process works as well: it would have to wait otherwise.
            given = helpers.take(batch) if number >= ALONE else None
            waiting.append((batch, given or _done(_examined(batch, wish))))
            while waiting and (waiting[0][1].done() or len(waiting) > 4 * (1 + helpers.number)):
                batch, found = waiting.popleft()
                yield from zip(batch, found.result(), strict=True)
        for batch, found in waiting:
            yield from zip(batch, found.result(), strict=True)


def _examined(batch: list[Text], wish: Wish) -> list[Found]:
    return [Found([], problem=each.problem) if each.problem else examine(each.text, wish) for each in batch]


def _done(result: list[Found]) -> Future[list[Found]]:
    future: Future[list[Found]] = Future()
    future.set_result(result)
    return future


class _Helpers:
    """Other processes that examine games. They end with this one, however it ends: their input does."""

    def __init__(self, wish: Wish) -> None:
        self.wish = wish
        self.number = min(MOST_HELPERS, len(os.sched_getaffinity(0)) - 1)
        self._threads = ThreadPoolExecutor(max(1, self.number), "examine")
        self._own = threading.local()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._given: list[Future[list[Found]]] = []
        self._closed = False

    def __enter__(self) -> _Helpers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        for process in self._processes:
            process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:  # also of one that a thread started meanwhile
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):  # what was not written yet: nobody reads it
                        pipe.close()

    def take(self, batch: list[Text]) -> Future[list[Found]] | None:
        """None: they have enough to do."""
        self._given = [future for future in self._given if not future.done()]
        if len(self._given) >= 2 * self.number:
            return None
        self._given.append(self._threads.submit(self._ask, batch))
        return self._given[-1]

    def _ask(self, batch: list[Text]) -> list[Found]:
        """In a thread, each of which has a process of its own."""
        try:
            if not hasattr(self._own, "process"):
                self._own.process = self._start()
            pickle.dump(batch, self._own.process.stdin)
            self._own.process.stdin.flush()
            return pickle.load(self._own.process.stdout)
        except (
            OSError,
            EOFError,
            pickle.UnpicklingError,
        ):  # could not be started, or was ended, for its memory perhaps
            return [] if self._closed else _examined(batch, self.wish)

    def _start(self) -> subprocess.Popen[bytes]:
        # -P: a chess.py in the user's folder is not the package of that name. A session of its own: Ctrl-C is for this process.
        program = f"from {__name__} import serve; serve(uci={self.wish.uci}, pgn={self.wish.pgn})"
        command = [sys.executable, "-P", "-c", program]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
        )
        self._processes.append(process)
        return process


def serve(*, uci: bool, pgn: bool) -> None:
    """What a helper does, until nobody asks it any more."""
    wish, given, answers = Wish(uci, pgn), sys.stdin.buffer, sys.stdout.buffer
    while True:
        try:
            batch: Any = pickle.load(given)
        except EOFError:
            return
        pickle.dump(_examined(batch, wish), answers)
        answers.flush()
