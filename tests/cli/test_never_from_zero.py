"""A run that had checkpoints never begins anew by itself: it goes on, or stops and says which are there and why none is used."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
from pathlib import Path

import pytest
from torch import Tensor, nn

from shardwise.launch.environment import attempt
from shardwise.tasks import Loss
from tests.checkpoint.test_newer import make_newer
from tests.checkpoint.test_store import contents
from tests.cli.program import shardwise
from tests.cli.test_train import curve
from tests.tasks import Ragged

CONFIG = """
task: tests.tasks:Ragged
name: ragged
training:
  {batch_size: 3, max_steps: 6, checkpoint_every_n_steps: 2, log_every_n_steps: 1, keep_last: 9, async_checkpoint: false,
   eval_at_start: false, num_gpus: 1, hang_timeout: 20}
"""


class Harmed(Ragged):
    """In the step that the environment names, rank 0 does to the checkpoints what it says there, and is killed."""

    forwards = 0

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        Harmed.forwards += model.training
        step, _, harm = os.environ.get("HARM", "0:").partition(":")
        if not attempt() and Harmed.forwards == int(step) and os.environ.get("RANK", "0") == "0":
            for checkpoint in Path("runs/ragged/checkpoints").glob("step-*"):
                if harm == "damage":
                    (checkpoint / "tensors.json").write_text("{}")
                elif harm == "remove":
                    shutil.rmtree(checkpoint)
            if harm == "newer":
                make_newer(max(Path("runs/ragged/checkpoints").glob("step-*")))
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints at steps 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("work")
    (folder / "ragged.yaml").write_text(CONFIG)
    done = shardwise(folder, "train", "ragged.yaml")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def work(original: Path, tmp_path: Path) -> Path:
    shutil.copytree(original, tmp_path / "work")
    return tmp_path / "work"


LONGER = ("--set", "training.max_steps=8")


def checkpoints(work: Path) -> Path:
    return work / "runs" / "ragged" / "checkpoints"


def names(work: Path) -> list[str]:
    return sorted(path.name for path in checkpoints(work).iterdir())


def damage(work: Path) -> None:
    (checkpoints(work) / "step-00000002" / "manifest.json").unlink()
    (checkpoints(work) / "step-00000004" / "tensors.json").write_text("")
    shard = next((checkpoints(work) / "step-00000006").glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)


def test_where_all_are_damaged_it_stops_names_each_and_changes_nothing_until_told_to_begin_anew(work: Path) -> None:
    damage(work)
    before = contents(work / "runs" / "ragged" / "checkpoints")
    for _ in range(2):
        done = shardwise(work, "train", "ragged.yaml", "--resume", "auto", *LONGER)
        assert done.returncode == 2 and "Traceback" not in done.stderr
        assert done.stderr.startswith("error: there are checkpoints in runs/ragged/checkpoints, and none can be used")
        for step, why in (
            (2, "there is no manifest"),
            (4, "tensors.json has 0 bytes"),
            (6, "has changed: its checksum"),
        ):
            assert f"step-0000000{step} is damaged: " in done.stderr and why in done.stderr
        assert contents(checkpoints(work)) == before
        assert [step for step, *_ in curve(work)] == [1, 2, 3, 4, 5, 6]
    told = done.stderr.rpartition("beside:  ")[2].strip()
    assert told.endswith(" --fresh")
    assert shardwise(work, *shlex.split(told)[1:]).returncode == 0
    assert (work / "runs" / "ragged-1" / "checkpoints" / "step-00000006").is_dir()


def test_those_set_aside_as_damaged_count_as_well(work: Path) -> None:
    """As an earlier version left them, which began anew then."""
    damage(work)
    for path in list(checkpoints(work).iterdir()):
        path.rename(path.with_name(f"damaged-{path.name}"))
    for log in (work / "runs" / "ragged" / "ranks").iterdir():
        log.unlink()
    before = names(work)
    done = shardwise(work, "train", "ragged.yaml", "--resume", "auto", *LONGER)
    assert done.returncode == 2 and "none can be used" in done.stderr
    assert "damaged-step-00000002 is damaged, and was set aside: there is no manifest" in done.stderr
    assert names(work) == before


def test_one_of_a_newer_version_stops_it_unless_an_earlier_one_is_named(work: Path) -> None:
    newer = make_newer(checkpoints(work) / "step-00000006")
    before = contents(checkpoints(work))
    for command in (
        ["train", "ragged.yaml", "--resume", "auto", *LONGER],
        ["train", "ragged.yaml", "--resume", "latest", *LONGER],
        ["train", "ragged.yaml", "--resume", str(newer), *LONGER],
        ["export", "runs/ragged", "--to", "model", "--config", "ragged.yaml"],
        ["export", "runs/ragged", "--to", "model", "--config", "ragged.yaml", "--checkpoint", "last"],
        ["export", "runs/ragged", "--to", "model", "--config", "ragged.yaml", "--checkpoint", str(newer)],
    ):
        done = shardwise(work, *command)
        assert done.returncode == 2 and "Traceback" not in done.stderr, command
        assert "step-00000006 cannot be read by this shardwise: a newer shardwise wrote it" in done.stderr, command
        assert "Update shardwise, or name an earlier checkpoint by its path" in done.stderr
        assert contents(checkpoints(work)) == before, command
    earlier = str(checkpoints(work) / "step-00000004")
    harmed = ("--set", "task=tests.cli.test_never_from_zero:Harmed", "--max-restarts", "1")
    done = shardwise(work, "train", "ragged.yaml", "--resume", earlier, *LONGER, *harmed, HARM="3:nothing")
    assert done.returncode == 0, done.stderr
    assert "restart 1 of 1: going on from step 6" in done.stderr
    assert names(work) == [f"step-0000000{step}" for step in (2, 4, 6, 8)] + ["superseded-step-00000006"]
    assert [step for step, *_ in curve(work)] == list(range(1, 9))


@pytest.mark.parametrize("harm", ["damage", "remove", "newer"])
def test_restarted_ranks_do_not_begin_anew_either(tmp_path: Path, harm: str) -> None:
    (tmp_path / "ragged.yaml").write_text(CONFIG)
    two = ("--set", "training.num_gpus=2", "--set", "task=tests.cli.test_never_from_zero:Harmed")
    done = shardwise(tmp_path, "train", "ragged.yaml", *two, HARM=f"5:{harm}")
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.count("restart ") == 1
    why = {
        "damage": "none can be used",
        "remove": "this run had a checkpoint of step 4, and there is none in",
        "newer": "step-00000004 cannot be read by this shardwise: a newer shardwise wrote it",
    }[harm]
    assert why in done.stderr.partition("restart ")[2]
    assert [step for step, *_ in curve(tmp_path)] == [1, 2, 3, 4], "nothing was trained after it"


def test_machines_that_come_and_go_do_not_begin_anew_either(work: Path) -> None:
    damage(work)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = ("--nodes", "1", "--rendezvous", f"localhost:{port}")
    done = shardwise(work, "train", "ragged.yaml", *where, *LONGER)
    assert done.returncode == 2 and "none can be used" in done.stderr and "restart " not in done.stderr
    assert "To start anew, move runs/ragged/checkpoints aside" in done.stderr


@pytest.mark.parametrize("left", ["nothing", ".writing-step-00000002", "superseded-step-00000009"])
def test_a_run_that_came_to_no_checkpoint_begins(tmp_path: Path, original: Path, left: str) -> None:
    (tmp_path / "ragged.yaml").write_text(CONFIG)
    if left != "nothing":
        shutil.copytree(checkpoints(original) / "step-00000002", checkpoints(tmp_path) / left)
    done = shardwise(tmp_path, "train", "ragged.yaml", "--resume", "auto")
    assert done.returncode == 0, done.stderr
    assert [step for step, *_ in curve(tmp_path)] == [1, 2, 3, 4, 5, 6]


def test_killed_before_its_first_checkpoint_a_run_is_started_again_from_the_beginning(tmp_path: Path) -> None:
    """Even beside what is left of a run before it, which --fresh has set aside, damaged ones included."""
    (tmp_path / "ragged.yaml").write_text(CONFIG)
    for name in ("step-00000002", "damaged-step-00000004"):
        (tmp_path / "elsewhere" / name).mkdir(parents=True)
    options = ["training.num_gpus=2", "training.checkpoint_dir=elsewhere", "task=tests.cli.test_never_from_zero:Harmed"]
    sets = [word for option in options for word in ("--set", option)]
    done = shardwise(tmp_path, "train", "ragged.yaml", "--fresh", *sets, HARM="2:nothing")
    assert done.returncode == 0, done.stderr
    assert "restart 1 of 3: from the beginning" in done.stderr
    assert sorted(path.name for path in (tmp_path / "elsewhere").glob("*step*")) == [
        "step-00000002", "step-00000004", "step-00000006", "superseded-damaged-step-00000004", "superseded-step-00000002",
    ]  # fmt: skip


def test_a_plain_start_does_not_set_one_of_a_newer_version_aside(tmp_path: Path, original: Path) -> None:
    """Its folder of checkpoints is shared by runs; --fresh is the user's word for it."""
    (tmp_path / "ragged.yaml").write_text(CONFIG)
    shutil.copytree(checkpoints(original) / "step-00000006", tmp_path / "elsewhere" / "step-00000006")
    make_newer(tmp_path / "elsewhere" / "step-00000006")
    elsewhere = ("--set", "training.checkpoint_dir=elsewhere")
    for resume in ((), ("--resume", "auto")):
        done = shardwise(tmp_path, "train", "ragged.yaml", *elsewhere, *resume)
        assert done.returncode == 2 and "elsewhere/step-00000006 cannot be read by this shardwise" in done.stderr
        assert "--fresh" in done.stderr and not (tmp_path / "runs" / "ragged" / "run.json").exists()
        assert (tmp_path / "elsewhere" / "step-00000006").is_dir()
    assert shardwise(tmp_path, "train", "ragged.yaml", *elsewhere, "--fresh").returncode == 0
    assert (tmp_path / "elsewhere" / "superseded-step-00000006" / "manifest.json").exists()


def test_export_changes_nothing_and_says_what_it_passed_over(work: Path) -> None:
    (checkpoints(work) / "step-00000006" / "tensors.json").write_text("")
    before = contents(checkpoints(work))
    written = work / "runs" / "ragged" / "config.yaml"
    written.write_text(written.read_text().replace("tests.tasks:Ragged", "tests.cli.test_never_from_zero:Sent"))
    (work / "ragged.yaml").write_text(CONFIG.replace("tests.tasks:Ragged", "tests.cli.test_never_from_zero:Sent"))
    done = shardwise(work, "export", "runs/ragged", "--to", "model", "--config", "ragged.yaml", "--checkpoint", "last")
    assert done.returncode == 0, done.stderr
    assert done.stderr == (
        "warning: checkpoint runs/ragged/checkpoints/step-00000006 is damaged: tensors.json has 0 bytes instead of "
        f"{json.loads((checkpoints(work) / 'step-00000006' / 'manifest.json').read_text())['files']['tensors.json']['size']}\n"
    )
    assert "exported runs/ragged/checkpoints/step-00000004 to model" in done.stdout
    assert contents(checkpoints(work)) == before


class Sent(Ragged):
    def export(self, model: nn.Module, folder: Path) -> None:
        (folder / "weights").write_text(str(sum(value.numel() for value in model.state_dict().values())))
