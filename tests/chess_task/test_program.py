"""Files of games through the program, as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.tasks.chess.games import random_game
from tests.chess_task.files import json_lines
from tests.cli.program import SHARDWISE, run_program

CONFIG = """
task: chess
data: {source: local, paths: [games.jsonl]}
model: {hidden_dim: 16, num_layers: 2, num_heads: 2}
tokenizer: {max_seq_len: 16}
training: {batch_size: 4, max_steps: 2}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    games = [random_game(0, index, 20 if index < 5 else 9) for index in range(40)]
    (tmp_path / "games.jsonl").write_bytes(json_lines(*games, "e2e4 e7e6 e4e6"))
    (tmp_path / "chess.yaml").write_text(CONFIG)
    return tmp_path


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_illegal_game_is_one_message_before_training_and_leaves_nothing(folder: Path, ranks: int) -> None:
    done = run_program([SHARDWISE, "train", "chess.yaml", "--set", f"training.num_gpus={ranks}"], folder)
    assert done.returncode == 2, done.stderr
    assert "games.jsonl, line 41: 'e4e6' is not a legal move after 2 half-moves" in done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert sorted(file.name for file in folder.iterdir() if file.name != "cache") == ["chess.yaml", "games.jsonl"]


def test_what_is_left_out_and_cut_is_told_once_and_the_rest_is_trained_on(folder: Path) -> None:
    command = [SHARDWISE, "train", "chess.yaml", "--set", "data.illegal_games=skip", "--set", "training.num_gpus=2"]
    done = run_program(command, folder)
    assert done.returncode == 0, done.stderr
    told = done.stdout + done.stderr
    assert told.count("1 of 41 texts is left out, being no game of legal moves (data.illegal_games: skip)") == 1
    assert (
        told.count("5 of 40 games are longer than tokenizer.max_seq_len: 16 and are cut there: 6.1% of all tokens") == 1
    )
    lines = (folder / "runs" / "chess" / "metrics.jsonl").read_text().splitlines()
    assert any("eval" in json.loads(line) for line in lines)
