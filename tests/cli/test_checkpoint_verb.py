"""`shardwise checkpoint list|verify|repair`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from shardwise.cli import main
from tests.cli.program import shardwise

CONFIG = """
task: tests.tasks:Ragged
training: {strategy: single, batch_size: 8, max_epochs: 3, save_top_k: 9, eval_at_start: false}
"""


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints at steps 7, 14 and 21."""
    folder = tmp_path_factory.mktemp("work")
    (folder / "a.yaml").write_text(CONFIG)
    done = shardwise(folder, "train", "a.yaml")
    assert done.returncode == 0, done.stderr
    return folder / "runs" / "a"


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    shutil.copytree(original, tmp_path / "run")
    return tmp_path / "run"


def test_they_are_listed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "checkpoints" / ".writing-step-00000023").mkdir()
    assert main(["checkpoint", "list", str(run)]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["step", "epoch", "metric", "size", "written"]
    assert [line.split()[:2] for line in lines[:3]] == [["7", "1"], ["14", "2"], ["21", "3"]]
    assert ["newest" in line for line in lines] == [False, False, True, False]
    assert lines[3] == "  .writing-step-00000023: never finished"


def test_a_whole_run_is_said_to_be_whole(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "verify", str(run)]) == 0
    assert capsys.readouterr().out.count(": whole (") == 3


def test_a_damaged_one_is_found_named_and_left_alone(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shard = run / "checkpoints" / "step-00000021" / "rank-0000-000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert main(["checkpoint", "verify", str(run / "checkpoints")]) == 1
    said = capsys.readouterr()
    assert "step-00000021: rank-0000-000.safetensors has changed: its checksum does not match" in said.out
    assert "damaged: step 21" in said.err
    assert shard.exists()


def test_a_stranger_among_the_files_is_a_note(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "checkpoints" / "step-00000014" / ".DS_Store").touch()
    assert main(["checkpoint", "verify", str(run)]) == 0
    said = capsys.readouterr().out
    assert said.count(": whole (") == 3
    assert "  note: .DS_Store does not belong to it, and does no harm\n" in said


def test_repair_leaves_the_newest_whole_one_to_go_on_from(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run / "checkpoints"
    (folder / "step-00000021" / "tensors.json").unlink()
    (folder / "step-00000014").rename(folder / ".replaced-step-00000014")  # killed between two renames
    (folder / ".writing-step-00000023").mkdir()
    assert main(["checkpoint", "repair", str(run)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "step-00000014 was about to be replaced and is back in place",
        ".writing-step-00000023 (never finished) was removed",
        f"checkpoint {folder}/step-00000021 is damaged and set aside as damaged-step-00000021: tensors.json is missing",
        f"--resume auto goes on from {folder}/step-00000014",
    ]
    assert main(["checkpoint", "repair", str(run)]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "there was nothing to repair"


def test_where_nothing_whole_is_left_it_says_so(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for manifest in run.glob("checkpoints/*/manifest.json"):
        manifest.unlink()
    assert main(["checkpoint", "repair", str(run)]) == 1
    assert "no whole checkpoint is left in" in capsys.readouterr().err


@pytest.mark.parametrize("action", ["list", "verify", "repair"])
def test_a_folder_without_checkpoints_is_refused(
    action: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoint", action, str(tmp_path)]) == 2
    assert f"there are no checkpoints in {tmp_path}" in capsys.readouterr().err
    assert main(["checkpoint", action, str(tmp_path / "nowhere")]) == 2
