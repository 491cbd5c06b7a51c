"""A checkpoint that a newer shardwise wrote is refused by its name, and stays as it is, whatever is done in its folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from shardwise.checkpoint import CheckpointStore, Saver, begin_anew, load_into
from shardwise.checkpoint.store import NewerCheckpoint
from shardwise.cli import main
from shardwise.data import Cursor
from shardwise.data.manifest import NAME, VERSION, entry_of, problems_of
from shardwise.engine.state import RunState
from shardwise.errors import CheckpointError
from shardwise.parallel import World
from tests.checkpoint.test_store import commit, contents, steps_of


def make_newer(checkpoint: Path) -> Path:
    """As a shardwise of the future might write it: sealed in a way that is not known here."""
    manifest = json.loads((checkpoint / NAME).read_text())
    (checkpoint / NAME).write_text(json.dumps({**manifest, "version": VERSION + 1, "seal": "…", "files": [["x"]]}))
    return checkpoint


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    """Whole ones of steps 10, 20 and 40, and between them one of a newer version."""
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    for step in (10, 20, 30, 40):
        commit(store, step, metric=step / 100)
    make_newer(store.place(30))
    return store


@pytest.fixture
def newest(store: CheckpointStore) -> CheckpointStore:
    """The newest of all is the newer shardwise's."""
    shutil.rmtree(store.place(40))
    return store


REFUSED = (
    r"step-00000030 cannot be read by this shardwise: a newer shardwise wrote it: manifest version 2, known here up to 1\. It is "
    r"left as it is, and no earlier one is taken in its place\. Update shardwise, or name an earlier checkpoint by its path"
)


def test_it_is_refused_and_nothing_is_renamed_not_even_what_is_damaged(newest: CheckpointStore) -> None:
    (commit(newest, 35) / "a.bin").unlink()
    before = contents(newest.folder)
    with pytest.raises(NewerCheckpoint, match=REFUSED):
        newest.newest_whole()
    for named in (newest.folder, newest.folder.parent, newest.place(30)):
        with pytest.raises(NewerCheckpoint, match=REFUSED):
            newest.named(named)
    assert contents(newest.folder) == before


def test_a_whole_one_after_it_or_named_by_its_path_is_taken(store: CheckpointStore) -> None:
    assert store.newest_whole() == (store.place(40), [])
    assert store.named(store.place(20)) == (store.place(20), [])


def test_which_is_the_best_is_not_known_beside_it(store: CheckpointStore) -> None:
    with pytest.raises(NewerCheckpoint, match=REFUSED):
        store.best_whole("min")


@pytest.mark.parametrize("which", ["auto", "latest"])
def test_a_run_does_not_go_on_from_the_one_before(newest: CheckpointStore, which: str) -> None:
    before = contents(newest.folder)
    model = nn.Linear(3, 2)
    with pytest.raises(CheckpointError, match=REFUSED + r"\n  To start anew, move .*checkpoints aside"):
        load_into(model, torch.optim.AdamW(model.parameters()), which, newest, World.alone())
    assert contents(newest.folder) == before


def test_retention_neither_counts_nor_touches_it(store: CheckpointStore) -> None:
    store.retire(keep_best=0, mode="min", keep_last=2)
    assert steps_of(store) == [20, 30, 40]


def test_no_run_begins_over_it_unless_the_user_says_so(store: CheckpointStore) -> None:
    before = contents(store.folder)
    with pytest.raises(NewerCheckpoint, match=REFUSED):
        begin_anew(store, World.alone(), asked=False)
    assert contents(store.folder) == before
    begin_anew(store, World.alone(), asked=True)
    assert steps_of(store) == []
    assert (store.folder / "superseded-step-00000030" / "a.bin").exists()


def test_a_step_that_is_written_again_does_not_replace_it(store: CheckpointStore) -> None:
    before = contents(store.place(30))
    with pytest.raises(NewerCheckpoint, match=REFUSED):
        commit(store, 30)
    assert contents(store.place(30)) == before


def test_going_on_from_an_earlier_one_by_its_path_sets_it_aside_whole(tmp_path: Path) -> None:
    """Otherwise a restart of the same run would stop at it."""
    store = CheckpointStore(tmp_path)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in (10, 20):
        saver = Saver(store, World.alone(), lambda: None)
        saver.save(model, optimizer, step, RunState(step, Cursor(0, step)).as_plain())
        saver.wait()
    before = contents(make_newer(store.place(20)))
    assert load_into(model, optimizer, str(store.place(10)), store, World.alone()) == store.place(10)
    store.supersede_after(10)
    assert contents(store.folder / "superseded-step-00000020") == before
    assert store.newest_whole() == (store.place(10), [])


def test_repair_leaves_it_even_where_a_commit_was_interrupted(
    store: CheckpointStore, capsys: pytest.CaptureFixture[str]
) -> None:
    (store.folder / ".writing-step-00000050").mkdir()
    store.place(30).rename(store.folder / ".replaced-step-00000030")
    before = contents(store.folder)
    assert main(["checkpoint", "repair", str(store.folder)]) == 0
    assert contents(store.folder) == {**before, ".lock": (store.folder / ".lock").read_bytes()}
    assert capsys.readouterr().out.splitlines()[0] == ".writing-step-00000050 (never finished) was removed"


def test_list_verify_and_repair_name_it(newest: CheckpointStore, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(newest.folder)
    assert main(["checkpoint", "list", str(newest.folder)]) == 0
    assert (
        capsys.readouterr()
        .out.splitlines()[3]
        .endswith("a newer shardwise wrote it: manifest version 2, known here up to 1; left as it is")
    )
    assert main(["checkpoint", "verify", str(newest.folder)]) == 1
    said = capsys.readouterr()
    assert said.out.count(": whole (") == 2 and "step-00000030: a newer shardwise wrote it" in said.out
    assert said.err.splitlines() == ["of a newer shardwise: step 30. Update shardwise to check it"]
    assert main(["checkpoint", "repair", str(newest.folder)]) == 2
    assert "step-00000030 cannot be read by this shardwise" in capsys.readouterr().err
    assert contents(newest.folder) == {**before, ".lock": (newest.folder / ".lock").read_bytes()}


@pytest.mark.parametrize("digit", [b"3", b"5", b"9"])
def test_a_flipped_bit_in_the_version_is_damage(store: CheckpointStore, digit: bytes) -> None:
    file = store.place(10) / NAME
    file.write_bytes(file.read_bytes().replace(b'"version": 1', b'"version": ' + digit))
    assert problems_of(store.place(10)) == ["the manifest is not of version 1"]


def test_what_else_it_remembers_may_be_newer_too(tmp_path: Path) -> None:
    """The manifest is of this version, and holds a key that a later one knows."""
    store = CheckpointStore(tmp_path)
    aside = store.begin(10)
    (aside / "a.bin").write_bytes(b"a")
    path = store.commit(10, {"a.bin": entry_of(aside / "a.bin")}, {**RunState(10).as_plain(), "mood": 1})
    assert not aside.exists()
    with pytest.raises(CheckpointError) as caught:
        RunState.of_checkpoint(path)
    assert str(caught.value) == (
        f"checkpoint {path} was not written by this version of shardwise: it holds mood, which a newer one may know. Update "
        "shardwise, or name an earlier checkpoint by its path"
    )
