from __future__ import annotations

import json
import random
from pathlib import Path

import chess
import pytest

from shardwise.errors import DataError
from shardwise.tasks.chess.config import ChessData
from shardwise.tasks.chess.games import load_games, random_game
from shardwise.tasks.chess.movetext import plies
from shardwise.tasks.chess.tokens import MoveTokenizer
from tests.chess_task.files import GAMES, json_lines, read
from tests.conftest import REPOSITORY


def test_synthetic_games_are_legal_and_follow_from_the_seed() -> None:
    game = random_game(3, 5, 40)
    assert len(plies(game)) == 40  # plies() plays every move on a board and refuses an illegal one
    assert game == random_game(3, 5, 40)
    assert game != random_game(4, 5, 40) and game != random_game(3, 6, 40)


def test_every_legal_move_is_one_token() -> None:
    tokenizer = MoveTokenizer()
    assert tokenizer.size == 1968 + 3
    promotion = chess.Board("8/P6k/8/8/8/8/8/K7 w - - 0 1")
    for board in (chess.Board(), promotion):
        assert all(move.uci() in tokenizer.words for move in board.legal_moves)
    for index in range(20):
        text = random_game(0, index, 120)
        assert " ".join(tokenizer.words[i] for i in tokenizer.encode(text, with_moves=False).ids[1:-1]) == text


def test_san_and_uci_become_the_same_tokens() -> None:
    tokenizer = MoveTokenizer()
    san, uci = (tokenizer.encode(text, with_moves=True) for text in ("1. e4 e5 2. Nf3", "e2e4 e7e5 g1f3"))
    assert san == uci


@pytest.mark.parametrize("with_moves", [False, True])
def test_castling_is_one_token_in_training_and_validation_however_it_is_written(with_moves: bool) -> None:
    tokenizer = MoveTokenizer()
    before = "e2e4 e7e5 g1f3 g8f6 f1c4 f8c5"
    written = ("e1g1 e8g8", "e1h1 e8h8", "O-O O-O", "0-0 0-0", "e1g1 O-O")
    ids = {tuple(tokenizer.encode(f"{before} {castling}", with_moves=with_moves).ids) for castling in written}
    assert ids == {(1, *(tokenizer.words.index(word) for word in f"{before} e1g1 e8g8".split()), 2)}
    rook = '[FEN "3k4/8/8/8/8/8/6K1/4R3 w - - 0 1"]\ne1h1'
    assert tokenizer.encode(rook, with_moves=with_moves).ids == [1, tokenizer.words.index("e1h1"), 2]


def test_games_are_tokenised_without_a_board_as_with_one() -> None:
    """On a board each takes a millisecond and more, which a training that tokenises as it goes waits for."""
    tokenizer = MoveTokenizer()
    words, castled, played = ("e1h1", "e1a1", "e8h8", "e8a8"), 0, 0
    for seed in range(45):
        choose = random.Random(seed)
        board = chess.Board() if seed % 3 else chess.Board("r3k2r/pppppppp/8/8/8/8/PPPPPPPP/R3K2R w KQkq - 0 1")
        text = [] if seed % 3 else [f'[FEN "{board.fen()}"]\n']
        while len(text) < 120 and (legal := list(board.legal_moves)):
            of_rank = [move for move in legal if move.uci() in words]  # a rook or a queen that moves along it
            castling = [move for move in legal if board.is_castling(move)]
            move = choose.choice((castling if seed % 2 else []) or of_rank or legal)
            castled, played = castled + board.is_castling(move), played + (move in of_rank)
            text.append(board.uci(move, chess960=choose.random() < 0.5))  # castling as e1g1 or as e1h1
            board.push(move)
        whole = text[0] + " ".join(text[1:]) if seed % 3 == 0 else " ".join(text)
        without = tokenizer.encode(whole, with_moves=False)
        assert without.ids == tokenizer.encode(whole, with_moves=True).ids
    assert castled > 15 and played > 15


def test_castling_becomes_the_same_text_for_a_tokenizer_of_text(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    uci, san = "e2e4 e7e5 g1f3 g8f6 f1c4 f8c5 {} e8g8", "1. e4 e5 2. Nf3 Nf6 {{x}} 3. Bc4 Bc5 4. {}! O-O"
    games, _ = read(file, json_lines(*(uci.format(each) for each in ("e1g1", "e1h1")), uci.format("e1g1").upper()))
    assert set(games) == {uci.format("e1g1")}
    games, _ = read(file, json_lines(*(san.format(each) for each in ("O-O", "0-0", "o-o"))))
    assert set(games) == {san.format("O-O")}  # and all else is as it was written


def test_training_and_validation_share_no_game() -> None:
    train, valid = load_games(ChessData(num_games=50, valid_fraction=0.2), seed=1)
    assert (len(train), len(valid)) == (40, 10)
    assert not set(train) & set(valid)
    assert len(set(train) | set(valid)) == 50


def test_jsonl_files_are_read_in_their_order(tmp_path: Path) -> None:
    good, other = tmp_path / "good.jsonl", tmp_path / "valid.jsonl"
    good.write_text('{"text": "e2e4"}\n\n{"text": "d2d4"}\n{"text": ["c2c4", "c7c5"]}\n')
    other.write_text('{"text": "g1f3"}\n')
    paths = [str(good), str(write(tmp_path / "more.jsonl", "a2a3"))]
    train, valid = load_games(ChessData(source="local", paths=paths, valid_paths=[str(other)]), seed=0)
    assert list(train) == ["e2e4", "d2d4", "c2c4 c7c5", "a2a3"] and list(valid) == ["g1f3"]
    with pytest.raises(IndexError):
        train[4]
    with pytest.raises(DataError, match="one game cannot be split"):
        load_games(ChessData(source="local", paths=[str(other)]), seed=0)


def write(file: Path, *texts: str) -> Path:
    file.write_bytes(json_lines(*texts))
    return file


def test_illegal_games_are_an_error_with_file_and_line_or_left_out_and_counted(tmp_path: Path) -> None:
    file, bad = tmp_path / "a.jsonl", ["e2e5", "e4 e4", "d4 d5 Kf2", "once upon", "e4 Kk", "nf3", "1. e4 e5 4. Nf3"]
    with pytest.raises(DataError) as refusal:
        read(file, json_lines(GAMES[0], *bad, *GAMES[1:]))
    assert str(refusal.value).splitlines() == [
        "7 of 10 texts are no games of legal moves:",
        f"  {file}, line 2: 'e2e5' is not a legal move after 0 half-moves",
        f"  {file}, line 3: 'e4' is not a legal move after 1 half-moves",
        f"  {file}, line 4: 'Kf2' is not a legal move after 2 half-moves",
        f"  {file}, line 5: 'once' is not a legal move after 0 half-moves",
        f"  {file}, line 6: 'Kk' is not a legal move after 1 half-moves",
        "  and 2 more",
        "Mend or remove them, or leave them out: data.illegal_games: skip",
    ]
    games, said = read(file, illegal_games="skip")
    assert games == GAMES and len(said) == 1
    assert said[0].startswith(
        "7 of 10 texts are left out, being no games of legal moves (data.illegal_games: skip). The first: "
    )
    with pytest.raises(DataError, match=r"no games in .*a.jsonl: 7 of 7 texts are no games of legal moves"):
        read(file, json_lines(*bad), illegal_games="skip")


def test_several_games_in_a_text_are_an_error_or_taken_apart(tmp_path: Path) -> None:
    file, joined = tmp_path / "a.jsonl", "1. e4 e5 2. Nf3 1-0 1. a4 a5 0-1"
    with pytest.raises(DataError) as refusal:
        read(file, json_lines(GAMES[0], joined, GAMES[1]))
    assert str(refusal.value).splitlines() == [
        "1 of 3 texts holds more than one game:",
        f"  {file}, line 2: there are 2 games in one text: after 3 half-moves another begins with 'a4'",
        "Write each on a line of its own, or have them taken apart: data.joined_games: split",
    ]
    with pytest.raises(DataError, match="holds more than one game"):
        read(file, illegal_games="skip")
    games, said = read(file, joined_games="split")
    assert games == [GAMES[0], "1. e4 e5 2. Nf3 1-0", "1. a4 a5 0-1", GAMES[1]]
    assert said == [
        "1 of 3 texts holds more than one game: they are taken apart (data.joined_games: split). The first: "
        f"{file}, line 2: there are 2 games in one text: after 3 half-moves another begins with 'a4'"
    ]
    assert read(file, joined_games="split", uci=True)[0] == [GAMES[0], "e2e4 e7e5 g1f3", "a2a4 a7a5", GAMES[1]]


def test_texts_without_a_move_are_left_out_and_counted(tmp_path: Path) -> None:
    games, said = read(tmp_path / "a.jsonl", json_lines(*GAMES, "", "  ", "1-0", "*", "{nothing}", []))
    assert games == GAMES
    assert said == [f"6 of 9 texts hold no move: left out. The first: {tmp_path / 'a.jsonl'}, line 4"]


def test_where_a_game_starts_can_stand_under_a_key_of_its_own(tmp_path: Path) -> None:
    fen = "4k3/8/8/8/8/8/8/R3K2R w KQ - 0 1"
    lines = [{"text": "O-O Ke7", "fen": fen}, {"text": "e2e4", "fen": ""}, {"text": "d2d4", "fen": None}]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    games, _ = read(tmp_path / "a.jsonl", content, fen_column="fen")
    assert games == [f'[FEN "{fen}"]\nO-O Ke7', "e2e4", "d2d4"]
    games, _ = read(tmp_path / "a.jsonl", json_lines("c2c4") + content + json_lines("b2b4"), fen_column="fen")
    assert games == ["c2c4", f'[FEN "{fen}"]\nO-O Ke7', "e2e4", "d2d4", "b2b4"]  # left out is null
    with pytest.raises(DataError, match="line 1: 'O-O' is not a legal move after 0 half-moves"):
        read(tmp_path / "a.jsonl", content)
    with pytest.raises(
        DataError, match=r"line 1: no key 'start', and in no other line \(found: text, fen\); data.fen_column"
    ):
        read(tmp_path / "a.jsonl", content, fen_column="start")


def test_a_hugging_face_data_set_is_read_with_lists_of_moves_too(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    rows = [{"Moves": ["e2e4", "e7e5"]}, {"Moves": ["d2d4"]}, {"Moves": ["c2c4"]}]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ChessData(source="hub", dataset=str(folder), text_column="Moves", valid_fraction=0.3)
    train, valid = load_games(options, seed=0)
    assert sorted([*train, *valid]) == ["c2c4", "d2d4", "e2e4 e7e5"]
    for bad, message in (
        ({"Moves": ["e2e5"]}, r"set \(train\), row 1: 'e2e5' is not a legal move after 0 half-moves"),
        ({"Moves": None}, r"set \(train\), row 1: 'Moves' is null: a text is expected, or a list of moves"),
    ):
        other = tmp_path / "other" / str(message.count("null")) / "set"
        other.mkdir(parents=True)
        (other / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (rows[0], bad, *rows[1:])))
        with pytest.raises(DataError, match=message):
            load_games(ChessData(source="hub", dataset=str(other), text_column="Moves"), seed=0)
    with pytest.raises(DataError, match=r"data.fen_column: .* has no column 'FEN'; it has Moves"):
        load_games(ChessData(source="hub", dataset=str(folder), text_column="Moves", fen_column="FEN"), seed=0)
    with pytest.raises(DataError, match="has no column 'text'; it has Moves"):
        load_games(ChessData(source="hub", dataset=str(folder)), seed=0)
    with pytest.raises(DataError, match=r"data.dataset: .*nothing' \(split 'train'\) is neither a folder"):
        load_games(ChessData(source="hub", dataset=str(tmp_path / "nothing")), seed=0)


def test_the_games_in_the_docs_are_read(tmp_path: Path) -> None:
    page = (REPOSITORY / "docs" / "running.md").read_text()
    lines = [line for line in page.splitlines() if line.startswith('{"text"')]
    assert len(lines) == 3
    games, _ = read(tmp_path / "a.jsonl", "\n".join(lines).encode(), uci=True)
    assert [game.split("\n")[-1] for game in games] == [
        "e2e4 e7e5 g1f3 b8c6",
        "d2d4 g8f6 c2c4 g7g6 b1c3",
        "e1c1 e8e7",
    ]
