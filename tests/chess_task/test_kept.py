"""Games are checked once: what is kept is used while the files are what they were, and only then."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chess
import psutil
import pytest

from shardwise.data.cache import cache_folder
from shardwise.errors import DataError
from shardwise.tasks.chess import examine, kept
from shardwise.tasks.chess.examine import Found, Text, Wish, examine_all
from shardwise.tasks.chess.files import GamesFile
from shardwise.tasks.chess.games import random_game
from tests.chess_task.files import GAMES, json_lines, read


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every text that is checked, in this process."""
    seen: list[str] = []
    really = examine.examine
    monkeypatch.setattr(examine, "examine", lambda text, wish: seen.append(text) or really(text, wish))
    return seen


def test_a_file_is_checked_once_and_again_when_it_has_changed(
    tmp_path: Path, checks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.jsonl"
    read(file, json_lines(*GAMES))
    assert checks[:3] == GAMES

    def checked_again() -> bool:
        checks.clear()
        read(file)
        return any(
            text != "g1f3 g8f6" for text in checks
        )  # that one is in the file to validate on, which `read` writes anew

    assert not checked_again()
    before = file.stat()
    file.write_bytes(json_lines("e2e4 c7c5", *GAMES[1:]))  # as long as before
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))  # and of the same time
    assert read(file)[0] == ["e2e4 c7c5", *GAMES[1:]]
    assert not checked_again()
    monkeypatch.setattr(kept, "VERSION", kept.VERSION + 1)
    assert checked_again() and not checked_again()
    monkeypatch.setattr(chess, "__version__", "another")
    assert checked_again() and not checked_again()
    checks.clear()
    read(file, uci=True)  # kept in another way
    assert "e2e4 c7c5" in checks


def test_what_is_an_error_is_found_again_and_can_be_left_out_without_another_check(
    tmp_path: Path, checks: list[str]
) -> None:
    file = tmp_path / "a.jsonl"
    for content in (json_lines("e2e5", *GAMES), None):
        with pytest.raises(DataError, match=r"a.jsonl, line 1: 'e2e5' is not a legal move"):
            read(file, content)
    assert checks.count("e2e5") == 1
    games, said = read(file, illegal_games="skip")
    assert games == GAMES and checks.count("e2e5") == 1
    assert said == [
        "1 of 4 texts is left out, being no game of legal moves (data.illegal_games: skip). The first: "
        f"{file}, line 1: 'e2e5' is not a legal move after 0 half-moves"
    ]


@pytest.mark.parametrize("name", ["games.txt", "bounds.npy", "digests.npy", "about.json"])
@pytest.mark.parametrize("harm", ["cut", "flip", "gone"])
def test_a_kept_copy_that_is_damaged_is_made_anew(tmp_path: Path, name: str, harm: str) -> None:
    file = tmp_path / "a.jsonl"
    read(file, json_lines(*GAMES))
    for copy in (cache_folder() / "chess").iterdir():
        content = (copy / name).read_bytes()
        if harm == "gone":
            (copy / name).unlink()
        else:
            middle = len(content) - 3
            (copy / name).write_bytes(
                content[:middle] + (b"" if harm == "cut" else bytes([content[middle] ^ 4]) + content[middle + 1 :])
            )
    assert read(file)[0] == GAMES


def test_a_file_that_is_still_written_is_not_trained_on(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(json_lines(*GAMES))

    class Growing(GamesFile):
        def texts(self) -> Iterator[Text]:
            yield from super().texts()
            file.write_bytes(json_lines(*GAMES, "b2b4"))

    with pytest.raises(DataError, match=r"a.jsonl has changed while its games were checked"):
        kept.keep_games(Growing(file, "data.paths", "text"), uci=False, whole=True)
    assert not list((cache_folder() / "chess").iterdir())


def test_a_cache_that_cannot_be_written_says_which_variable_names_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "file"))
    with pytest.raises(
        DataError, match=r"the checked games of .*a.jsonl cannot be kept in .*file/chess: .*SHARDWISE_CACHE"
    ):
        read(tmp_path / "a.jsonl", json_lines(*GAMES))


def test_kept_games_are_handed_to_other_processes_by_their_place(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(json_lines(*GAMES * 1000))
    games = kept.keep_games(GamesFile(tmp_path / "a.jsonl", "data.paths", "text"), uci=False, whole=True)
    pickled = pickle.dumps(games)
    assert len(pickled) < 1000 and list(pickle.loads(pickled)) == list(games) == GAMES * 1000


def a_thousand() -> list[Text]:
    texts = [random_game(0, index, 6) for index in range(3000)]
    texts[1700] = "e2e5"
    return [Text(line, text) for line, text in enumerate(texts, start=1)]


@pytest.mark.slow
def test_several_processes_find_the_same_in_the_same_order(monkeypatch: pytest.MonkeyPatch) -> None:
    wish, texts = Wish(uci=True, pgn=False), a_thousand()
    alone = [(text, examine.examine(text.text, wish)) for text in texts]
    asked: list[int] = []
    ask = examine._Helpers._ask
    monkeypatch.setattr(
        examine._Helpers, "_ask", lambda self, batch: asked.append(self._start().pid) or ask(self, batch)
    )
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    assert list(examine_all(texts, wish)) == alone
    assert asked


@pytest.mark.slow
def test_a_helper_that_dies_is_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    wish, texts = Wish(uci=True, pgn=False), a_thousand()
    start = examine._Helpers._start

    def dying(self: Any) -> Any:
        process = start(self)
        process.kill()
        return process

    monkeypatch.setattr(examine._Helpers, "_start", dying)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    assert [found for _, found in examine_all(texts, wish)] == [examine.examine(text.text, wish) for text in texts]


@pytest.mark.slow
def test_a_check_that_is_broken_off_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    before = {child.pid for child in psutil.Process().children()}
    found = examine_all(a_thousand() * 100, Wish(uci=True, pgn=False))
    for _ in range(4000):
        next(found)
    assert {child.pid for child in psutil.Process().children()} - before
    found.close()  # type: ignore[attr-defined]
    assert not {child.pid for child in psutil.Process().children()} - before


def test_helpers_end_with_whom_they_help(tmp_path: Path) -> None:
    """Also if that process is killed and can do nothing about it."""
    program = (
        "import os; os.sched_getaffinity = lambda pid: {0, 1, 2}\n"
        "import itertools\n"
        "from shardwise.tasks.chess.examine import *\n"
        "texts = (Text(n, 'g1f3 g8f6 f3g1 f6g8 ' * 20) for n in itertools.count())\n"
        "for n, _ in enumerate(examine_all(texts, Wish(uci=True, pgn=False))):\n"
        "    if n == 3000: print('on', flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"on\n"
    helpers = psutil.Process(process.pid).children()
    assert helpers
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    _, alive = psutil.wait_procs(helpers, timeout=20)
    assert not alive


def test_a_long_check_tells_how_far_it_is_and_of_the_first_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kept, "PROGRESS_SECONDS", -1.0)
    with caplog.at_level(logging.INFO), pytest.raises(DataError):
        read(tmp_path / "a.jsonl", json_lines(*GAMES, "e2e5"))
    assert f"checking the games of {tmp_path / 'a.jsonl'}: 2 are read, about 0 s left" in caplog.messages
    assert any("line 4: 'e2e5' is not a legal move" in said and "The check goes on" in said for said in caplog.messages)


def test_the_same_game_has_one_digest_however_it_is_written() -> None:
    def digest(text: str) -> int:
        return examine.examine(text, Wish(uci=False, pgn=False)).games[0].digest

    same = {digest(text) for text in ("1. e4 e5 2. Nf3", "e2e4 e7e5 g1f3", "e4 {x} e5 Nf3!? 1-0")}
    assert len(same) == 1 and digest("e4 e5 Nc3") not in same
    assert digest('[FEN "rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq - 5 9"]\ne4 e5 Nf3') not in same


def test_what_is_found_can_be_sent_between_processes() -> None:
    found = Found([], problem="x", line=3)
    assert pickle.loads(pickle.dumps(found)) == found
