"""What only reads changes nothing, and gets along with a run that removes checkpoints meanwhile."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from shardwise.checkpoint import CheckpointStore, export, inspect
from shardwise.checkpoint.inspect import condition_of_checkpoint
from shardwise.cli import main
from shardwise.data import manifest
from shardwise.data.manifest import NAME
from shardwise.errors import CheckpointError
from tests.checkpoint.test_store import commit, contents, steps_of
from tests.tasks import Ragged, config_of


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    for step in (10, 20, 30):
        commit(store, step, metric=step / 100)
    return store


class Read(Exception):
    """What was read, and does not fit."""


def exporting(monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[Path], None]) -> list[Path]:
    """`meanwhile` is done while a checkpoint is read. Returns what was exported, in order."""
    tried: list[Path] = []

    def read(task: Any, checkpoint: Path, folder: Path) -> None:
        tried.append(checkpoint)
        meanwhile(checkpoint)
        (folder / "weights").write_text((checkpoint / "a.bin").read_text())

    monkeypatch.setattr(export, "export_checkpoint", read)
    return tried


def export_to(store: CheckpointStore, folder: Path) -> Path:
    task = Ragged(config_of("task: tests.tasks:Ragged"))
    return export.export_one(task, lambda: store.named(store.folder, act=False), folder)


def test_of_one_that_vanishes_while_it_is_read_the_next_newest_is_taken(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def meanwhile(checkpoint: Path) -> None:
        if len(tried) == 1:
            commit(store, 40, content="newer")
            shutil.rmtree(checkpoint)

    tried = exporting(monkeypatch, meanwhile)
    assert export_to(store, tmp_path / "model") == store.place(40)
    assert tried == [store.place(30), store.place(40)]
    assert (tmp_path / "model" / "weights").read_text() == "newer a.bin"


def test_of_one_that_is_written_again_meanwhile_no_mixture_is_exported(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def meanwhile(checkpoint: Path) -> None:
        if len(tried) == 1:
            commit(store, 30, content="again")

    tried = exporting(monkeypatch, meanwhile)
    assert export_to(store, tmp_path / "model") == store.place(30)
    assert len(tried) == 2 and (tmp_path / "model" / "weights").read_text() == "again a.bin"


def test_where_each_vanishes_there_is_one_clear_error(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def meanwhile(checkpoint: Path) -> None:
        commit(store, 30 + 10 * len(tried))
        shutil.rmtree(checkpoint)

    tried = exporting(monkeypatch, meanwhile)
    with pytest.raises(
        CheckpointError, match=r"step-00000070, and 4 before it, were removed while they were read: the run"
    ):
        export_to(store, tmp_path / "model")
    assert len(tried) == 5


def test_what_is_wrong_with_one_that_stays_is_said_at_once(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def meanwhile(checkpoint: Path) -> None:
        raise CheckpointError("it does not fit")

    tried = exporting(monkeypatch, meanwhile)
    with pytest.raises(CheckpointError, match="it does not fit"):
        export_to(store, tmp_path / "model")
    assert len(tried) == 1


@pytest.mark.parametrize("best", [True, False])
def test_one_that_vanishes_while_it_is_checked_is_not_called_damaged(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, best: bool
) -> None:
    """All that were listed go as a newer one comes."""
    real = manifest.read_manifest

    def read(folder: Path) -> dict[str, Any]:
        if store.place(10).is_dir():
            commit(store, 40, metric=0.01)
            for step in (10, 20, 30):
                shutil.rmtree(store.place(step))
        return real(folder)

    monkeypatch.setattr(manifest, "read_manifest", read)  # as the checks call it, and not the listing
    chosen = store.best_whole("min") if best else store.named(store.folder, act=False)
    assert chosen == (store.place(40), []) and steps_of(store) == [40]


def test_the_best_that_is_damaged_is_told_and_the_next_best_taken(store: CheckpointStore) -> None:
    (store.place(10) / "a.bin").write_text("other")
    (store.place(30) / NAME).write_text("{")
    before = contents(store.folder)
    best, said = store.best_whole("min")
    assert best == store.place(20)
    assert [each.partition(":")[0] for each in said] == [
        f"checkpoint {store.place(10)} is damaged",
        f"checkpoint {store.place(30)} is damaged",
    ]
    assert contents(store.folder) == before


def test_another_runs_damaged_checkpoints_are_not_renamed(store: CheckpointStore, tmp_path: Path) -> None:
    (store.place(30) / "a.bin").unlink()
    mine = CheckpointStore(tmp_path / "mine")
    path, said = mine.named(store.folder.parent)
    assert path == store.place(20) and len(said) == 1 and "set aside" not in said[0]
    assert steps_of(store) == [10, 20, 30]


@pytest.mark.parametrize("action", ["list", "verify"])
def test_one_that_vanishes_is_no_damage_to_the_verb(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], action: str
) -> None:
    from shardwise.engine.state import RunState

    def gone(folder: Path) -> Any:
        if folder == store.place(10):
            shutil.rmtree(store.place(20))
        return condition_of_checkpoint(folder)

    def removed(folder: Path) -> RunState:
        if folder == store.place(10):
            shutil.rmtree(store.place(20))
        return RunState()

    monkeypatch.setattr(inspect, "condition_of_checkpoint", gone)
    monkeypatch.setattr(RunState, "of_checkpoint", staticmethod(removed))
    assert main(["checkpoint", action, str(store.folder)]) == 0
    said = capsys.readouterr()
    assert said.err == "" and ("step-00000020: removed meanwhile" in said.out) == (action == "verify")


def test_a_model_is_exported_whole(tmp_path: Path) -> None:
    """Not only what stands in for it above."""
    import torch

    from shardwise.checkpoint import Saver
    from shardwise.parallel import World

    task = Ragged(config_of("task: tests.tasks:Ragged"))
    task.export = lambda model, folder: torch.save(model.state_dict(), folder / "weights")  # type: ignore[method-assign]
    model: nn.Module = task.build_model()
    store = CheckpointStore(tmp_path / "checkpoints")
    saver = Saver(store, World.alone(), lambda: None)
    saver.save(model, torch.optim.AdamW(model.parameters()), 10, {"metric": None})
    (written,) = saver.wait()
    assert written.problem is None
    assert export.export_one(task, lambda: store.best_whole("min"), tmp_path / "model") == store.place(10)
    weights = torch.load(tmp_path / "model" / "weights", weights_only=True)
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
