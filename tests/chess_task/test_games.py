from __future__ import annotations

import json
from pathlib import Path

import chess
import pytest

from shardwise.errors import DataError
from shardwise.tasks.chess.config import ChessData
from shardwise.tasks.chess.games import load_games, random_game
from shardwise.tasks.chess.movetext import plies
from shardwise.tasks.chess.tokens import MoveTokenizer


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


def test_training_and_validation_share_no_game() -> None:
    train, valid = load_games(ChessData(num_games=50, valid_fraction=0.2), seed=1)
    assert (len(train), len(valid)) == (40, 10)
    assert not set(train) & set(valid)
    assert len(set(train) | set(valid)) == 50


def test_jsonl_files_are_read_and_their_mistakes_named(tmp_path: Path) -> None:
    good, other = tmp_path / "good.jsonl", tmp_path / "valid.jsonl"
    good.write_text('{"text": "e2e4"}\n\n{"text": "d2d4"}\n{"text": "c2c4"}\n')
    other.write_text('{"text": "g1f3"}\n')
    train, valid = load_games(ChessData(source="local", paths=[str(good)], valid_paths=[str(other)]), seed=0)
    assert list(train) == ["e2e4", "d2d4", "c2c4"] and list(valid) == ["g1f3"]
    for content, message in [
        ('{"text": "e2e4"}\nnonsense\n', "bad.jsonl, line 2: not valid JSON"),
        ('{"game": "e2e4"}\n', r"bad.jsonl, line 1: no text under 'text' \(found: game\); data.text_column"),
        ('["e2e4"]\n', "line 1: no text under 'text'"),
        ("", "no games in"),
    ]:
        bad = tmp_path / "bad.jsonl"
        bad.write_text(content)
        with pytest.raises(DataError, match=message):
            load_games(ChessData(source="local", paths=[str(bad)]), seed=0)
    with pytest.raises(DataError, match=r"data.paths: there is no file .*missing.jsonl"):
        load_games(ChessData(source="local", paths=[str(tmp_path / "missing.jsonl")]), seed=0)
    bad.write_bytes(b'{"text": "\xff"}')
    with pytest.raises(DataError, match=r"bad.jsonl is not a text file in UTF-8"):
        load_games(ChessData(source="local", paths=[str(bad)]), seed=0)
    bad.write_text('{"text": "e2e4"}\n')
    with pytest.raises(DataError, match="one game cannot be split"):
        load_games(ChessData(source="local", paths=[str(bad)]), seed=0)


def test_a_hugging_face_data_set_is_read_with_lists_of_moves_too(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    rows = [{"Moves": ["e2e4", "e7e5"]}, {"Moves": ["d2d4"]}, {"Moves": ["c2c4"]}]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ChessData(source="hub", dataset=str(folder), text_column="Moves", valid_fraction=0.3)
    train, valid = load_games(options, seed=0)
    assert sorted([*train, *valid]) == ["c2c4", "d2d4", "e2e4 e7e5"]
    with pytest.raises(DataError, match="has no column 'text'; it has Moves"):
        load_games(ChessData(source="hub", dataset=str(folder)), seed=0)
    with pytest.raises(DataError, match=r"data.dataset: .*nothing' \(split 'train'\) is neither a folder"):
        load_games(ChessData(source="hub", dataset=str(tmp_path / "nothing")), seed=0)
