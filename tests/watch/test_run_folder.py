"""What a run writes beside its checkpoints: a disk that is full for a while costs nothing, and no secret gets there."""

from __future__ import annotations

import json
import logging
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from shardwise.config import Config, Training
from shardwise.config.commands import user_command
from shardwise.config.secrets import without_secrets
from shardwise.errors import LaunchError
from shardwise.watch.console import Console
from shardwise.watch.run_folder import RunFolder
from tests.cli.program import shardwise


@contextmanager
def no_file_longer_than(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_metrics_that_could_not_be_written_are_written_later_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("shardwise"), "propagate", True)
    folder = RunFolder(tmp_path)
    folder.add_metrics({"step": 1})
    with no_file_longer_than(20):
        for step in (2, 3, 4):
            folder.add_metrics({"step": step})
    folder.add_metrics({"step": 5})
    folder.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path / 'metrics.jsonl'} cannot be written: File too large; training goes on"
    ], "it is said once"


def test_a_log_on_a_full_disk_does_not_end_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "log.txt").open("w") as log:
        monkeypatch.setattr("sys.stdout", log)
        console = Console(0, 1, tmp_path)
        try:
            with no_file_longer_than(10):
                console.say("a line that is longer than there is room for")
            console.say("another")
        finally:
            console.close()
    assert (tmp_path / "log.txt").read_text().endswith("another\n")


def test_secrets_of_the_environment_are_in_no_file_of_a_run_and_not_in_what_it_says(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        "task: tests.tasks:Ragged\ntraining: {strategy: single, max_steps: 2, logger: [tensorboard, wandb]}\n"
    )
    secrets = {"WANDB_API_KEY": "s3cret-" + "a" * 33, "AWS_SECRET_ACCESS_KEY": "s3cret-b", "HF_TOKEN": "s3cret-c"}
    done = shardwise(tmp_path, "train", "a.yaml", **secrets)
    assert done.returncode == 0, done.stderr
    assert "s3cret" not in done.stdout + done.stderr
    files = [file for file in (tmp_path / "runs").rglob("*") if file.is_file()]
    assert len(files) > 5
    assert [file for file in files if b"s3cret" in file.read_bytes()] == []


ENVIRON = {
    "WANDB_API_KEY": "s3cret-one",
    "AWS_ACCESS_KEY_ID": "s3cret-two",
    "AWS_SESSION_TOKEN": "s3cret-one-and-more",
    "HF_TOKEN": "s3cret",
    "TOKENIZERS_PARALLELISM": "tokenizers-stay",
    "AWS_REGION": "eu-central-1",
    "A_KEY": "seed",
}


@pytest.mark.parametrize(
    ("word", "kept"),
    [
        ("s3cret-one", "***"),
        ("--set=data.source=https://u:s3cret-two@host/a", "--set=data.source=https://u:***@host/a"),
        ("x=s3cret-one-and-more", "x=***"),
        ("WANDB_API_KEY=never-exported", "WANDB_API_KEY=***"),
        ("logger.api_key=never-exported", "logger.api_key=***"),
        ("eu-central-1", "eu-central-1"),
        ("tokenizers-stay", "tokenizers-stay"),
        ("seed=3", "seed=3"),
        ("tokenizer.mask_token=<mask>", "tokenizer.mask_token=<mask>"),
    ],
)
def test_secrets_in_the_arguments_are_hidden(word: str, kept: str) -> None:
    assert without_secrets([word], ENVIRON) == [kept]


def test_the_command_in_run_json_has_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "s3cret-c")
    monkeypatch.setattr("sys.argv", ["shardwise", "train", "a.yaml", "--set", "data.source=s3cret-c"])
    folder = RunFolder(tmp_path, 0)
    folder.describe(Config(task="tests.tasks:Ragged"), {})
    assert json.loads((tmp_path / "run.json").read_text())["command"][-1] == "data.source=***"
    assert user_command() == "shardwise train a.yaml --set 'data.source=***'"


BEFORE_A_STEP: dict[str, str] = {
    "metrics.jsonl": '{"step": 0, "eval": {"loss": 1.0}}\n{"step": ',
    "ranks/rank-0000.jsonl": '{"step": 0, "checkpoint": {}, "problem": "no room"}\n',
    "ranks/rank-0001.log": "said",
    "checkpoints/superseded-step-00000007/manifest.json": "",
    "checkpoints/.writing-step-00000000/a": "",
    "config.yaml": "training: {checkpoint_dir: null}",
}
"""What may lie in a folder whose run has come to no step."""
BEGUN: dict[str, str] = {
    "metrics.jsonl": '{"step": 1, "loss": 1.0}\n',
    "ranks/rank-0001.jsonl": '{"step": 1, "seconds": {}}\n',
    "ranks/rank-0000.jsonl": '{"step": 0, "checkpoint": {}, "problem": null}\n',
    "checkpoints/step-00000000/manifest.json": "",
    "checkpoints/damaged-step-00000009-1/manifest.json": "",
    "checkpoints/.replaced-step-00000009/manifest.json": "",
    "elsewhere/step-00000009/manifest.json": "",
}


def lay(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.mark.parametrize("fresh", [False, True])
def test_a_folder_in_which_no_step_was_made_is_taken_as_it_is(tmp_path: Path, fresh: bool) -> None:
    run = tmp_path / "run"
    lay(run, {"run.json": "{}", **BEFORE_A_STEP})
    folder = RunFolder(run)
    notice = folder.claim(resume=False, fresh=fresh, training=Training(), checkpoints=run / "checkpoints")
    folder.close()
    assert notice == (
        f"the start that lies in {run} came to no step: this run takes its place; what its ranks said stays in {run}/ranks"
    )
    assert all((run / name).read_text() == text for name, text in BEFORE_A_STEP.items())
    assert list(tmp_path.iterdir()) == [run]


@pytest.mark.parametrize("name", BEGUN)
def test_a_folder_with_one_step_or_one_checkpoint_is_never_taken(tmp_path: Path, name: str) -> None:
    run = tmp_path / "run"
    elsewhere = json.dumps(str(run / "elsewhere"))
    lay(run, {"run.json": "{}", **BEFORE_A_STEP, "config.yaml": f"training: {{checkpoint_dir: {elsewhere}}}"})
    lay(run, {name: BEGUN[name]})
    with pytest.raises(LaunchError, match="already holds a run"):
        RunFolder(run).claim(resume=False, fresh=False, training=Training(), checkpoints=run / "checkpoints")


# ---------------------------------------------------------------- a folder that somebody else has written


def with_facts(folder: Path, facts: Any) -> RunFolder:
    text = facts if isinstance(facts, str) else json.dumps(facts)
    (folder / "run.json").write_text(text)
    return RunFolder(folder)


def test_the_batch_that_a_run_began_with_is_read_or_there_is_none(tmp_path: Path) -> None:
    assert RunFolder(tmp_path).batch_so_far() is None
    assert with_facts(tmp_path, {"shardwise": "0.0.1"}).batch_so_far() is None
    assert with_facts(tmp_path, {"batch": {"global": 64, "chosen_for": 2}}).batch_so_far() == (64, 2)


@pytest.mark.parametrize(
    "facts",
    [
        "", "{", "[]", "5", "\ufeff{}", '{"batch": {}, "batch": {}}', "[" * 100_000, '{"batch": ' + "9" * 5000 + "}",
        {"batch": []}, {"batch": {}}, {"batch": {"global": 64}}, {"batch": {"global": "64", "chosen_for": 2}},
        {"batch": {"global": 64.0, "chosen_for": 2}}, {"batch": {"global": True, "chosen_for": 2}},
        {"batch": {"global": -64, "chosen_for": 2}}, {"batch": {"global": 0, "chosen_for": 2}},
        {"batch": {"global": 2**62, "chosen_for": 2}}, {"batch": {"global": float("nan"), "chosen_for": 2}},
        {"batch": {"global": 64, "chosen_for": [2]}},
    ],
)  # fmt: skip
def test_facts_that_cannot_be_right_are_one_error_that_says_what_to_do(tmp_path: Path, facts: Any) -> None:
    """Otherwise the run would go on with another batch, without a word."""
    with pytest.raises(LaunchError, match=r"run\.json cannot be used: .* remove it"):
        with_facts(tmp_path, facts).batch_so_far()


@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl", "ranks/rank-0000.jsonl", "config.yaml"])
@pytest.mark.parametrize("what", ["pipe", "folder", "sparse", "loop"])
def test_what_is_no_log_is_refused_and_nobody_waits_for_it(tmp_path: Path, name: str, what: str) -> None:
    (tmp_path / "ranks").mkdir()
    file = tmp_path / name
    if what == "pipe":
        os.mkfifo(file)
    elif what == "folder":
        file.mkdir()
    elif what == "loop":
        file.symlink_to(file.name)
    else:
        file.touch()
        os.truncate(file, 2**36)
    folder = RunFolder(tmp_path)
    asked = {"run.json": folder.batch_so_far, "metrics.jsonl": folder.metrics, "config.yaml": folder._config_before}
    if name == "config.yaml":  # only what has changed since is told from it
        assert asked[name]() == {}
        return
    with pytest.raises(LaunchError, match=file.name):
        asked.get(name, folder.had_checkpoint)()


def test_lines_that_a_kill_has_cut_are_passed_over(tmp_path: Path) -> None:
    whole = ['{"step": 1, "loss": 2.0}', '{"step": 2, "loss": 1.0}', '{"step": 2, "eval": {"loss": 1.5}}']
    odd = ["[]", '{"step": true}', '{"step": "3"}', '{"step": 1e999}', '{"st']
    (tmp_path / "metrics.jsonl").write_text("\n".join(whole + odd))
    folder = RunFolder(tmp_path)
    assert [each["step"] for each in folder.metrics()[:3]] == [1, 2, 2]
    assert folder.evaluated_at(2) and not folder.evaluated_at(1)
    folder.forget_after(1)
    assert (tmp_path / "metrics.jsonl").read_text() == whole[0] + "\n"


def test_a_log_that_cannot_be_read_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')

    def fails(*_: Any, **__: Any) -> int:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as storage:
        storage.setattr(os, "open", fails)
        with pytest.raises(LaunchError, match=r"metrics\.jsonl cannot be read: Input/output error"):
            RunFolder(tmp_path).forget_after(0)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'
