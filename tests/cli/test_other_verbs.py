"""`shardwise config`, `shardwise export`, and what is answered to a verb that is not there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from shardwise.cli import VERBS
from tests.cli.program import run_anew, shardwise
from tests.conftest import REPOSITORY
from tests.hub import write_model

SMALL = ["--set", "data.num_games=40", "--set", "data.max_plies=8", "--set", "training.max_steps=3"]


@pytest.mark.parametrize(("verb", "hint"), [("tarin", ". Nearest: train"), ("plan", "")])
def test_an_unknown_verb_is_answered_with_those_that_exist(verb: str, hint: str, tmp_path: Path) -> None:
    done = run_anew(tmp_path, verb, "chess.yaml")
    assert done.returncode == 2
    assert done.stderr.endswith(f"error: {verb!r} is not a verb of shardwise: {', '.join(VERBS)}{hint}\n")


def test_help_lists_the_verbs_that_exist(tmp_path: Path) -> None:
    done = run_anew(tmp_path, "--help")
    assert done.returncode == 0
    listed = re.findall(r"^    (\w+)\b", done.stdout, re.MULTILINE)
    assert listed == list(VERBS) and "to come" not in done.stdout


def test_config_show_resolves_what_follows_from_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        "task: chess\ndata: {num_games: 100, valid_fraction: 0.1}\ntraining: {num_gpus: 2, batch_size: 4, total_batch_size: 16,"
        " max_epochs: 3, lr_scaling: linear, base_batch_size: 8, optimizer: {lr: 1e-3}}\n"
    )
    done = shardwise(tmp_path, "config", "show", "a.yaml")
    assert done.returncode == 0, done.stderr
    assert "effective batch size 16 = 4 per device × 2 accumulation × 2 devices" in done.stdout
    assert "learning rate        0.002 = 0.001 × 16 / 8 at its peak" in done.stdout
    assert "steps per epoch      6 for 90 training samples; 18 steps in all" in done.stdout
    assert "strategy ddp" in done.stdout
    import yaml

    assert yaml.safe_load(done.stdout)["training"]["save_top_k"] == 1


def test_config_schema_is_json_schema(tmp_path: Path) -> None:
    done = shardwise(tmp_path, "config", "schema")
    assert json.loads(done.stdout)["properties"]["training"]


def test_every_shipped_config_is_run_by_a_test() -> None:
    """Those of chess below, the others beside the tests of their task."""
    for config in (REPOSITORY / "configs").glob("*.yaml"):
        task = config.stem.partition("-")[0]
        tests = [file.read_text() for file in (REPOSITORY / "tests" / f"{task}_task").glob("test_*.py")]
        assert task == "chess" or any(config.stem in text for text in tests), config.name


def test_every_shipped_config_of_chess_trains_and_exports(tmp_path: Path) -> None:
    """Scaled down by overrides, with a model folder where the file names a hub model."""
    (tmp_path / "data").mkdir()
    from shardwise.tasks.chess.games import random_game

    games = "".join(json.dumps({"text": random_game(0, index, 10)}) + "\n" for index in range(60))
    (tmp_path / "data" / "games.jsonl").write_text(games)
    model = write_model(tmp_path / "hub-model")
    configs = sorted((REPOSITORY / "configs").glob("chess-*.yaml"))
    assert len(configs) >= 2
    for config in configs:
        overrides = [*SMALL]
        if config.stem == "chess-codellama":
            overrides = ["--set", f"model.name={model}", "--set", "training.max_steps=3", "--set", "data.num_workers=1"]
        done = shardwise(tmp_path, "train", str(config), *overrides)
        assert done.returncode == 0, f"{config.name}\n{done.stderr}"
        assert "legal move share" in done.stdout and "next move accuracy" in done.stdout
        exported = tmp_path / f"{config.stem}-model"
        done = shardwise(tmp_path, "export", f"runs/{config.stem}", "--to", str(exported))
        assert done.returncode == 0, done.stderr
        assert_loads_as_trained(exported, tmp_path / "runs" / config.stem)


def assert_loads_as_trained(exported: Path, run: Path) -> None:
    """from_pretrained gives the weights of the checkpoint, and the tokenizer reads a game."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from shardwise.checkpoint import load_model
    from shardwise.config import load_config
    from shardwise.tasks.chess.task import ChessTask

    loaded = AutoModelForCausalLM.from_pretrained(exported)
    task = ChessTask(load_config(run / "config.yaml"))
    expected = task.build_model()
    start = {name: value.clone() for name, value in expected.state_dict().items()}
    load_model(expected, sorted((run / "checkpoints").glob("step-*"))[-1])
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, expected.state_dict()[name]), name
    assert any(not torch.equal(start[name], value) for name, value in loaded.state_dict().items()), (
        "nothing was trained"
    )
    tokens = AutoTokenizer.from_pretrained(exported)("e2e4 e7e5")["input_ids"]
    assert tokens[-2:] == task.tokenizer.encode("e2e4 e7e5", with_moves=False).ids[:-1][-2:]


def test_export_answers_what_it_cannot_do(tmp_path: Path) -> None:
    done = shardwise(tmp_path, "export", "nowhere", "--to", "model")
    assert done.returncode == 2 and "nowhere is not the folder of a run: it has no config.yaml" in done.stderr
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("task: chess\n")
    done = shardwise(tmp_path, "export", "run", "--to", "run")
    assert done.returncode == 2 and "is there already and not empty" in done.stderr
    done = shardwise(tmp_path, "export", "run", "--to", "model")
    assert done.returncode == 2 and "there is no checkpoint" in done.stderr
    assert not (tmp_path / "model").exists() and not list(tmp_path.glob(".model*"))


def test_nothing_in_a_run_folder_is_taken_for_code(tmp_path: Path) -> None:
    """A run folder from somebody else, whose config names a module that lies in it."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("task: evil:Task\n")
    (run / "run.json").write_text(json.dumps({"import_from": [str(run)]}))
    for name in ("evil", "wandb", "chess"):
        (run / f"{name}.py").write_text("import pathlib\npathlib.Path(__file__).with_suffix('.ran').touch()\n")
    done = shardwise(tmp_path, "export", "run", "--to", "model")
    assert done.returncode == 2 and "is not run on the word of a run folder" in done.stderr
    (run / "config.yaml").write_text("task: chess\n")
    assert shardwise(tmp_path, "export", "run", "--to", "model").returncode == 2
    assert not list(run.glob("*.ran"))


def test_a_task_of_ones_own_is_exported_with_the_config_that_the_user_names(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("task: tests.tasks:Ragged\ntraining: {strategy: single, max_steps: 2}\n")
    assert shardwise(tmp_path, "train", "own.yaml").returncode == 0
    done = shardwise(tmp_path, "export", "runs/own", "--to", "model", "--config", "own.yaml")
    assert done.returncode == 0, done.stderr
    (tmp_path / "other.yaml").write_text("task: chess\n")
    done = shardwise(tmp_path, "export", "runs/own", "--to", "again", "--config", "other.yaml")
    assert done.returncode == 2 and "has task: chess, but the run trained tests.tasks:Ragged" in done.stderr
