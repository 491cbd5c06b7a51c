"""Files as people have them: compressed, cut off, damaged, from other systems. Read whole, or refused by name."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import chess
import pyarrow
import pytest

from shardwise.errors import DataError
from shardwise.tasks.chess.config import ChessData
from shardwise.tasks.chess.games import load_games
from tests.chess_task.files import GAMES, json_lines, read


def zstd(content: bytes) -> bytes:
    return pyarrow.compress(content, codec="zstd", asbytes=True)


PACKED: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "zst": zstd,
    "bz2": bz2.compress,
    "xz": lzma.compress,
}
PGN = """[Event "Blitz"]
[White "Müller, Jörg"]
[Result "1-0"]

1. e4 {[%clk 1:00] best (by
[%test] far)} e5 (1... c5 2. Nf3 (2. c3)) 2. Nf3!? $1 Nc6
3. Bb5 a6?? 4. O-O Nf6 1-0

[Event "b"]

1. d4 *


[Event "c"]
[FEN "4k3/8/8/8/8/8/8/R3K2R b KQ - 0 10"]

10... Kd7 11. 0-0-0+ Kc7 1/2-1/2
"""
IN_PGN = [
    "1. e4 e5 2. Nf3 Nc6 3. Bb5 a6 4. O-O Nf6 1-0",
    "1. d4",
    '[FEN "4k3/8/8/8/8/8/8/R3K2R b KQ - 0 10"]\n10... Kd7 11. O-O-O+ Kc7 1/2-1/2',
]


@pytest.mark.parametrize("ending", PACKED)
def test_a_compressed_file_is_read_whatever_its_name(tmp_path: Path, ending: str) -> None:
    packed = PACKED[ending](json_lines(*GAMES))
    assert read(tmp_path / f"games.jsonl.{ending}", packed) == (GAMES, [])
    assert read(tmp_path / "games.jsonl", packed) == (GAMES, [])
    assert read(tmp_path / f"games.pgn.{ending}", PACKED[ending](PGN.encode())) == (IN_PGN, [])
    two_in_a_row = packed + PACKED[ending](json_lines("b2b4 b7b5"))
    assert read(tmp_path / "two", two_in_a_row) == ([*GAMES, "b2b4 b7b5"], [])


@pytest.mark.parametrize("ending", PACKED)
def test_a_compressed_file_that_is_cut_off_or_damaged_is_named(tmp_path: Path, ending: str) -> None:
    packed = PACKED[ending](
        json_lines(*[f"{game} {'g1f3 g8f6 f3g1 f6g8 ' * (n % 7)}" for n, game in enumerate(GAMES * 99)])
    )
    file = tmp_path / f"games.jsonl.{ending}"
    for left in (3, 10, len(packed) // 2, len(packed) - 4, len(packed) - 1):
        with pytest.raises(
            DataError, match=rf"games.jsonl.{ending} (is damaged or cut off|does not begin as a .{ending})"
        ):
            read(file, packed[:left])
    with pytest.raises(DataError, match=f"games.jsonl.{ending} does not begin as a .{ending} file does: copy it again"):
        read(file, json_lines(*GAMES))
    with pytest.raises(DataError, match=f"games.jsonl.{ending} is empty: copy it again"):
        read(file, b"")
    if ending == "gz":  # it has a checksum
        with pytest.raises(DataError, match=r"games.jsonl.gz is damaged or cut off"):
            read(file, packed[:-6] + bytes([packed[-6] ^ 1]) + packed[-5:])
        with pytest.raises(DataError, match=r"games.jsonl.gz is damaged or cut off"):
            read(file, packed + b"and more")


def test_a_file_with_a_long_window_is_named_with_how_to_compress_it_again(tmp_path: Path) -> None:
    """A frame of zstd, by its specification: no sizes, a window of 2 GiB, one last block that is not compressed."""
    content = json_lines(*GAMES)
    packed = b"\x28\xb5\x2f\xfd\0\xa8" + (len(content) << 3 | 1).to_bytes(3, "little") + content
    with pytest.raises(
        DataError,
        match=r"a.jsonl.zst was compressed with a long window .*zstd -dc --long=31 .* \| zstd -o .*new-a.jsonl.zst",
    ):
        read(tmp_path / "a.jsonl.zst", packed)


def test_json_lines_end_at_line_feeds_alone(tmp_path: Path) -> None:
    """str.splitlines breaks a line at each of these characters, which may all stand in a text of JSON as they are."""
    inside = "".join(f'{{"text": "e2e4 e7e5", "by": "a{mark}b"}}\n' for mark in "\u2028\u2029\x85")
    assert read(tmp_path / "a.jsonl", inside.encode()) == (["e2e4 e7e5"] * 3, read(tmp_path / "a.jsonl")[1])
    windows = b"\xef\xbb\xbf" + json_lines(*GAMES).replace(b"\n", b"\r\n")
    assert read(tmp_path / "a.jsonl", windows) == (GAMES, [])
    assert read(tmp_path / "a.jsonl", json_lines(*GAMES)[:-1]) == (GAMES, [])  # no line feed at the end


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"nonsense\n", r"bad.jsonl, line 4: not valid JSON \(Expecting value\); each line is an object like"),
        (b'{"text": "e2e4', r"bad.jsonl, line 4: not valid JSON \(Unterminated string"),
        (b'{"text": "e2e4"} {"text": "e2e4"}\n', r"bad.jsonl, line 4: not valid JSON \(Extra data\)"),
        (b'{"game": "e2e4"}\n', r"line 4: no text under 'text' \(found: game\); data.text_column names the key"),
        (b'{"%s": 1}\n' % (b"x" * 9999), r"line 4: no text under 'text' \(found: x{80}\); data.text_column"),
        (b'["e2e4"]\n', r"line 4: no object, but of type list; each line is an object like"),
        (b'{"text": null}\n', "line 4: 'text' is null: a text is expected, or a list of moves"),
        (b'{"text": 5}\n', "line 4: 'text' is int '5': a text is expected"),
        (b'{"text": ["e2e4", 5]}\n', "line 4: 'text' is list .*: a text is expected"),
        (b'{"text": "e2e4", "text": "d2d4"}\n', "line 4: the key 'text' stands there twice"),
        (b'{"text": "\xff"}\n', "bad.jsonl is not a text file in UTF-8: invalid start byte at byte 10 of line 4"),
        (b"[" * 100_000, r"line 4: not valid JSON \("),
        (b'{"text": "e2e4 \\ud800"}\n', r"line 4: half a character \('.ud800'\) is no text"),
    ],
)
def test_a_line_that_is_no_text_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(tmp_path / "bad.jsonl", json_lines(*GAMES) + content)


def test_a_list_of_games_is_not_taken_for_one_game(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    for games in (["e2e4 e7e5", "d2d4 d7d5"], ["e2e4", "e7e5 g1f3"], ["e4 e5 1-0", "d4 d5 0-1"]):
        with pytest.raises(
            DataError, match=r"line 4: 'text' is a list of games \('e.* has several moves\): write each game on a line"
        ):
            read(file, json_lines(*GAMES, games), illegal_games="skip")
    with pytest.raises(DataError, match="there are 2 games in one text"):
        read(file, json_lines(["1. e4 e5 2. Nf3", "1. d4 d5 2. c4"]))
    one_game = [
        ["e2e4", "e7e5", "1-0"],
        ["1.", "e4", "e5", "2.", "Nf3"],
        ["1. e4 e5", "2. Nf3 Nc6"],
        ['[Event "by lines"]', "1. e4 e5 2. Nf3", "Nc6 3. Bb5"],
        ["e4 {better than d4 or c4}", "e5 (c5 Nf3 d6)"],
        ["4k3/8/8/8/8/8/8/R3K2R w KQ e3", "O-O"],
        ["e2e4 e7e5"],
    ]
    assert len(read(file, json_lines(*one_game))[0]) == len(one_game)


def test_two_positions_to_start_from_are_an_error_unless_they_are_the_same(tmp_path: Path) -> None:
    file, fen = tmp_path / "a.jsonl", "4k3/8/8/8/8/8/8/R3K2R w KQ - 0 1"

    def line(text: str, start: str) -> bytes:
        return json.dumps({"text": text, "fen": start}).encode() + b"\n"

    for text in (f'[FEN "{fen}"] 1. O-O Ke7', f'[White "a"]\n[FEN "{fen}"]\n\n1. O-O', f"{fen} 1. O-O"):
        with pytest.raises(
            DataError, match=r"line 2: 'text' says that the game starts from '4k3/.*, and 'fen' from 'rnbq"
        ):
            read(file, line("e2e4", "") + line(text, chess.STARTING_FEN), fen_column="fen", illegal_games="skip")
        assert read(file, line(text, fen.removesuffix(" 0 1")), fen_column="fen")[0] == [text]
    with pytest.raises(
        DataError, match="line 1: 'fen' is float 'nan': a position in FEN is expected, as a text, or null"
    ):
        read(file, b'{"text": "e2e4", "fen": NaN}', fen_column="fen")
    twice = f'[FEN "{fen}"] [FEN "{{}}"] 1. O-O'
    with pytest.raises(DataError, match="line 1: a second position to start from follows the first: 'rnbq"):
        read(file, json_lines(twice.format(chess.STARTING_FEN)))
    for again in (fen, ""):
        assert read(file, json_lines(twice.format(again)), uci=True)[0] == [f'[FEN "{fen}"]\ne1g1']


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b'[\n {"text": "e2e4"}\n]\n', "line 1: not valid JSON .*looks like one JSON array: write each"),
        (
            "a.json",
            b'[{"text": "e2e4"}, {"text": "d2d4"}]',
            "line 1: no object, but of type list.*looks like one JSON array: write each",
        ),
        (
            "a.json",
            b'["e2e4 e7e5", "d2d4 d7d5"]\n',
            "line 1: no object, but of type list.*looks like one JSON array: write each",
        ),
        (
            "a.json",
            b'["e2e4", "e7e5"]\n',
            r"line 1: no object, but of type list; each line is an object like {\"text\": …}$",
        ),
        ("a.pgn", json_lines(*GAMES), "a.pgn: its lines are JSON, not PGN: give the file a name with .jsonl"),
        ("a.pgn", b'[\n{"text": "e2e4"}\n]', "a.pgn: its lines are JSON, not PGN"),
        ("a.jsonl", PGN.encode(), "line 1: not valid JSON .*looks like PGN: give the file a name with .pgn"),
        ("a.txt", b"e2e4 e7e5\n", "line 1: not valid JSON .*Games of PGN are read from files named .pgn"),
        ("a.csv", b"id,moves\n1,e4 e5\n", "a.csv, line 1: not valid JSON"),
        (
            "a.jsonl",
            json_lines(*GAMES).decode().encode("utf-16"),
            "a.jsonl is UTF-16 text: save it as UTF-8",
        ),
        ("a.pgn", PGN.encode("utf-16"), "a.pgn is UTF-16 text"),
        ("a.zip", b"PK\x03\x04 and more", "a.zip is a zip archive"),
        ("a.parquet", b"PAR1 and more", "a.parquet is a Parquet file: JSON lines and PGN are read"),
        ("a.pgn", b'[Event "a"]\n\n1. e4\0 e5\n', "a.pgn, line 3: this is no text"),
    ],
)
def test_what_is_neither_json_lines_nor_pgn_is_told_apart(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        read(tmp_path / name, content)


def tar(content: bytes) -> bytes:
    with tarfile.open(fileobj=(whole := io.BytesIO()), mode="w") as archive:
        part = tarfile.TarInfo("inside.pgn")
        part.size = len(content)
        archive.addfile(part, io.BytesIO(content))
    return whole.getvalue()


@pytest.mark.parametrize("name", ["a.jsonl", "a.pgn", "a.pgn.gz"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\n", r"is a pointer of Git LFS.*\(git lfs pull\)"),
        (b"\xef\xbb\xbf\n<!DOCTYPE html><html><body>404</body></html>", "is a web page, not data: .*Download it again"),
        (b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>', "is a web page, not data"),
        (tar(PGN.encode()), r"is a tar archive: unpack it \(tar xf .*\) and name what is in it"),
        (gzip.compress(PGN.encode()), "is compressed twice: decompress it once"),
        (zstd(PGN.encode()), "is compressed twice: decompress it once"),
        (b"PK\x03\x04 and more", r"is a zip archive: unpack it \(unzip .*\) and name what is in it"),
    ],
)
def test_what_was_not_meant_as_data_is_named_with_what_to_do(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    with pytest.raises(DataError, match=rf"{name} {message}"):
        read(tmp_path / name, gzip.compress(content))


def test_a_comment_up_to_the_end_of_the_line_may_end_a_file_of_pgn(tmp_path: Path) -> None:
    assert read(tmp_path / "a.pgn", b"1. e4 e5 1-0 ; the end") == (["1. e4 e5 1-0"], [])


def test_a_path_that_is_no_file_is_named_with_its_key(tmp_path: Path) -> None:
    good = tmp_path / "good.jsonl"
    good.write_bytes(json_lines(*GAMES))

    def refused(paths: list[Path | str], valid: list[Path | str], message: str) -> None:
        with pytest.raises(DataError, match=message):
            load_games(
                ChessData(source="local", paths=list(map(str, paths)), valid_paths=list(map(str, valid))), seed=0
            )

    refused([tmp_path / "no.jsonl"], [], r"data.paths: there is no file .*no.jsonl$")
    refused([good], [tmp_path / "no.jsonl"], "data.valid_paths: there is no file")
    refused(["https://a.b/c.pgn"], [], "data.paths: https://a.b/c.pgn is an address: download it first")
    refused([good], ["s3://b/c.pgn"], "data.valid_paths: s3://b/c.pgn is an address")
    (tmp_path / "gone.jsonl").symlink_to("there.jsonl")
    (tmp_path / "round.jsonl").symlink_to("round.jsonl")
    os.mkfifo(tmp_path / "pipe.jsonl")
    refused([tmp_path / "gone.jsonl"], [], "data.paths: .*gone.jsonl is a link to there.jsonl, and that is not there")
    refused([tmp_path / "round.jsonl"], [], "data.paths: .*round.jsonl is a link to round.jsonl, and that is not there")
    refused([tmp_path / "pipe.jsonl"], [], "data.paths: .*pipe.jsonl is a pipe or a device, not a file")
    refused([tmp_path / "*.jsonl"], [], "there is no file .*Patterns are not filled in: name each file")
    refused(
        [tmp_path],
        [],
        r"data.paths: .* is a folder: name the files themselves \(gone.jsonl, good.jsonl, pipe.jsonl, …\)",
    )
    (tmp_path / "same.jsonl").symlink_to(good)
    refused([good, tmp_path / "same.jsonl"], [], "data.paths names .*good.jsonl twice: its games would count twice")
    refused([good], [good], "good.jsonl is in data.paths and in data.valid_paths")


@pytest.mark.parametrize(
    "content",
    [
        PGN.encode(),
        b"\xef\xbb\xbf" + PGN.encode(),
        PGN.encode("latin-1"),
        PGN.encode("latin-1").replace(b"\n", b"\r\n"),
        PGN.encode().replace(b"\n", b"\r"),
        PGN.replace('\n[Event "c"]', '\n{on the next}\n\n[Event "c"]').encode(),
        b"% made by hand\n\n" + PGN.encode(),
    ],
)
def test_games_of_pgn_are_their_main_lines(tmp_path: Path, content: bytes) -> None:
    assert read(tmp_path / "a.pgn", content) == (IN_PGN, [])
    in_uci = [
        "e2e4 e7e5 g1f3 b8c6 f1b5 a7a6 e1g1 g8f6",
        "d2d4",
        '[FEN "4k3/8/8/8/8/8/8/R3K2R b KQ - 0 10"]\ne8d7 e1c1 d7c7',
    ]
    games, said = read(tmp_path / "a.pgn", uci=True)
    assert games == in_uci
    assert said == ["1 of the games starts from a position of their own. With tokenizer.strategy: moves the model is given "
                    "their moves alone, and not the position"]  # fmt: skip


def test_games_of_pgn_without_tags_or_results_are_told_apart(tmp_path: Path) -> None:
    expected = ["1. e4 e5 1-0", "1. d4 d5 0-1", "1. c4"]
    for text in (
        "1. e4 e5 1-0\n\n1. d4 d5 0-1\n1. c4 *\n",
        "1. e4 e5 1-0 1. d4 d5 0-1 1. c4 *\n",
        "1. e4 e5 1–0\n\n1. d4 d5 0 - 1\n\n1. c4 *",
        "1. e4\ne5\n1-0\n\n1. d4 d5 {good}\n0-1\n\n\n1. c4 *",
    ):
        assert read(tmp_path / "a.pgn", text.encode()) == (expected, []), text
    no_results = '[Event "a"]\n\n1. e4 e5\n\n[Event "b"]\n\n1. d4 d5\n'
    assert read(tmp_path / "a.pgn", no_results.encode()) == (["1. e4 e5", "1. d4 d5"], [])


def test_a_game_of_pgn_without_moves_gives_the_next_one_nothing(tmp_path: Path) -> None:
    header = '[Event "a"]\n[FEN "4k3/8/8/8/8/8/8/R3K2R b KQ - 0 10"]\n\n'
    games, said = read(tmp_path / "a.pgn", (header + '[Event "b"]\n\n1. e4 *\n\n[Event "c"]\n\n1-0\n').encode())
    assert games == ["1. e4"]
    assert said == [f"2 of 3 texts hold no move: left out. The first: {tmp_path / 'a.pgn'}, line 1"]
    with pytest.raises(DataError, match=r"no games in .*a.pgn: 1 of 1 texts holds no move"):
        read(tmp_path / "a.pgn", header.encode())


def test_a_bad_game_of_pgn_is_named_by_the_line_of_the_move_and_spoils_no_other(tmp_path: Path) -> None:
    bad = '\n[Event "bad"]\n\n1. e4 e5\n2. Nf4 Nc6 1-0\n\n[Event "good"]\n\n1. c4 1-0\n'
    with pytest.raises(DataError, match=r"a.pgn, line 22: 'Nf4' is not a legal move after 2 half-moves"):
        read(tmp_path / "a.pgn", (PGN + bad).encode())
    assert read(tmp_path / "a.pgn", illegal_games="skip")[0] == [*IN_PGN, "1. c4 1-0"]
    unclosed = '[Event "bad"]\n\n1. e4 { e5\n\n[Event "good"]\n\n1. d4 1-0\n'
    with pytest.raises(DataError, match=r"a.pgn, line 3: a comment begins here with { and is not closed"):
        read(tmp_path / "a.pgn", unclosed.encode())
    assert read(tmp_path / "a.pgn", illegal_games="skip")[0] == ["1. d4 1-0"]
    with pytest.raises(DataError, match="line 3: this is a game of Atomic; those of chess and Chess960 are read"):
        read(tmp_path / "a.pgn", b'[Event "x"]\n[Variant "Atomic"]\n1. e4 1-0\n')


def test_a_file_of_pgn_that_is_cut_off_in_its_last_game_is_seen(tmp_path: Path) -> None:
    cut = PGN[: PGN.rindex(" Kc7")]
    with pytest.raises(
        DataError, match=r"a.pgn, line 14: the file ends before the result of this game, and all others have one"
    ):
        read(tmp_path / "a.pgn", cut.encode())
    assert read(tmp_path / "a.pgn", illegal_games="skip")[0] == IN_PGN[:2]
    for result in ("1–0", "½−½", "0 - 1"):
        assert len(read(tmp_path / "a.pgn", f"{cut} {result}".encode())[0]) == 3
