"""What is in place is whole: whatever is interrupted or damaged is never taken for a checkpoint."""

from __future__ import annotations

import errno
import itertools
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from torch import nn

from shardwise.checkpoint import CheckpointStore, Saver, load_into
from shardwise.checkpoint import store as store_room
from shardwise.data import Cursor
from shardwise.data import manifest as manifest_room
from shardwise.data.manifest import NAME, FileEntry, entry_of, problems_of, read_manifest, surplus_in
from shardwise.engine.state import RunState
from shardwise.errors import CheckpointError
from shardwise.parallel import World

INDEX, TENSORS = "tensors.json", "rank-0000-000.safetensors"
FILES = [NAME, TENSORS, INDEX]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as a run writes it: step 7 of a model of one layer."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = RunState(7, Cursor(1, 20), metric=0.25, best_metric=0.25, global_batch=8, samples=53, seed=3)
    store = CheckpointStore(tmp_path_factory.mktemp("run") / "checkpoints")
    saver = Saver(store, World.alone(), lambda: None)
    saver.save(model, optimizer, state.step, state.as_plain())
    return saver.wait()[0].path


@pytest.fixture
def store(tmp_path: Path, original: Path) -> CheckpointStore:
    shutil.copytree(original.parent, tmp_path / "checkpoints")
    return CheckpointStore(tmp_path / "checkpoints")


def commit(store: CheckpointStore, step: int, metric: float | None = None, content: str = "weights") -> Path:
    """A small checkpoint, written the way a run does."""
    aside = store.begin(step)
    for name in ("a.bin", "b.bin"):
        (aside / name).write_text(f"{content} {name}")
    (aside / TENSORS).write_bytes(save({"w": torch.zeros(1)}))
    (aside / INDEX).write_text(f'{{"w": {{"dtype": "F32", "shape": [1], "chunks": [[[0], [1], "{TENSORS}"]]}}}}')
    files = {file.name: entry_of(file) for file in aside.iterdir()}
    return store.commit(step, files, {"step": step, "metric": metric})


def steps_of(store: CheckpointStore) -> list[int]:
    return [found.step for found in store.every()]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_committed_checkpoint_is_whole(store: CheckpointStore) -> None:
    (found,) = store.every()
    assert sorted(file.name for file in found.path.iterdir()) == FILES
    assert problems_of(found.path) == []
    assert (found.step, found.metric) == (7, 0.25)
    assert store.newest_whole() == (found.path, [])
    assert RunState.of_checkpoint(found.path).cursor == Cursor(1, 20)


# ---------------------------------------------------------------- interrupted


@pytest.mark.parametrize("present", [part for k in range(3) for part in itertools.combinations(FILES, k)], ids=str)
def test_a_checkpoint_of_which_only_some_files_arrived_is_not_whole(
    store: CheckpointStore, original: Path, present: tuple[str, ...]
) -> None:
    """Copied file by file, as from one machine to another, and stopped at any of them."""
    partial = store.folder / "step-00000009"
    partial.mkdir()
    for name in present:
        shutil.copy(original / name, partial)
    whole, complaints = store.newest_whole()
    assert whole == store.folder / "step-00000007"
    assert len(complaints) == 1 and "damaged-step-00000009" in complaints[0]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kept", ["nothing", "half", "all but one byte"])
def test_a_file_that_was_cut_is_found(store: CheckpointStore, name: str, kept: str) -> None:
    file = store.folder / "step-00000007" / name
    data = file.read_bytes()
    file.write_bytes(data[: {"nothing": 0, "half": len(data) // 2, "all but one byte": len(data) - 1}[kept]])
    (problem,) = problems_of(file.parent)
    assert name in problem or "manifest" in problem
    assert store.newest_whole()[0] is None


@pytest.mark.parametrize("written", range(4))
def test_a_run_killed_while_it_writes_leaves_nothing_that_counts(
    store: CheckpointStore, original: Path, written: int
) -> None:
    """Even with all files, manifest included, written aside: only the rename makes it a checkpoint."""
    aside = store.begin(9)
    for name in FILES[:written]:
        shutil.copy(original / name, aside)
    assert steps_of(store) == [7]
    assert store.newest_whole() == (store.folder / "step-00000007", [])
    assert aside.is_dir(), "looking changes nothing"


def test_what_an_interrupted_run_left_aside_is_cleared_by_the_next(store: CheckpointStore) -> None:
    aside = store.begin(9)
    (aside / "stale.bin").write_text("of a run on more ranks")
    assert list(store.begin(9).iterdir()) == []
    path = commit(store, 9)
    assert problems_of(path) == []
    assert not aside.exists()


class Crash(BaseException):
    """Not an Exception: nothing may handle it, as nothing handles a kill."""


def rename_that_fails_at(number: int) -> Callable[[Path, Path], Path]:
    real, calls = Path.rename, itertools.count(1)

    def rename(self: Path, target: Path) -> Path:
        if next(calls) == number:
            raise Crash
        return real(self, target)

    return rename


def test_a_crash_before_the_manifest_is_written_changes_nothing_visible(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(store.folder / "step-00000007")

    def crash(*_: Any) -> None:
        raise Crash

    monkeypatch.setattr(store_room, "write_manifest", crash)
    for step in (7, 9):
        with pytest.raises(Crash):
            commit(store, step)
    assert steps_of(store) == [7]
    assert contents(store.folder / "step-00000007") == before
    assert store.newest_whole() == (store.folder / "step-00000007", [])


def test_a_crash_at_the_rename_changes_nothing_visible(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "rename", rename_that_fails_at(1))
    with pytest.raises(Crash):
        commit(store, 9)
    assert steps_of(store) == [7]
    assert store.newest_whole() == (store.folder / "step-00000007", [])


@pytest.mark.parametrize("at", [1, 2])
def test_a_crash_while_a_step_is_replaced_leaves_the_old_one(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Two renames are needed; between them neither is in its place, and still one must be found."""
    before = contents(store.folder / "step-00000007")
    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", rename_that_fails_at(at))
        with pytest.raises(Crash):
            commit(store, 7)
    whole, complaints = store.newest_whole()
    assert whole is not None and complaints == []
    assert contents(whole) == before
    assert steps_of(store) == [7]
    replaced = commit(store, 7, content="new")
    assert replaced.name == "step-00000007"
    assert (replaced / "a.bin").read_text() == "new a.bin"
    assert [path.name for path in store.folder.iterdir()] == ["step-00000007"]


def test_a_crash_while_the_replaced_one_is_deleted_leaves_the_new_one(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(_: Path) -> None:
        raise Crash

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", crash)
        with pytest.raises(Crash):
            commit(store, 7, content="new")
    (found,) = store.every()
    assert (found.path / "a.bin").read_text() == "new a.bin"
    assert problems_of(found.path) == []


def test_everything_is_on_disk_before_it_is_visible(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    real_flush, real_rename = manifest_room.flush, Path.rename

    def flush(path: Path) -> None:
        events.append(f"flush {path.name}")
        real_flush(path)

    def rename(self: Path, target: Path) -> Path:
        events.append(f"rename {self.name}")
        return real_rename(self, target)

    monkeypatch.setattr(manifest_room, "flush", flush)
    monkeypatch.setattr(store_room, "flush", flush)
    monkeypatch.setattr(Path, "rename", rename)
    commit(store, 9)
    visible = events.index("rename .writing-step-00000009")
    before, after = set(events[:visible]), events[visible + 1 :]
    assert before == {f"flush {name}" for name in ("a.bin", "b.bin", *FILES, ".writing-step-00000009")}
    assert events.index(f"flush {NAME}") < events.index("flush .writing-step-00000009")
    assert after == ["flush checkpoints"]


# ---------------------------------------------------------------- damaged


@pytest.mark.parametrize("name", FILES)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_flipped_bit_anywhere_in_any_file_is_found(store: CheckpointStore, name: str, data: st.DataObject) -> None:
    file = store.folder / "step-00000007" / name
    good = file.read_bytes()
    place = data.draw(st.integers(0, len(good) - 1), label="byte")
    bad = bytearray(good)
    bad[place] ^= 1 << data.draw(st.integers(0, 7), label="bit")
    file.write_bytes(bytes(bad))
    try:
        (problem,) = problems_of(file.parent)
        assert name in problem or "manifest" in problem
    finally:
        file.write_bytes(good)  # hypothesis shares the folder between examples
    assert problems_of(file.parent) == []


def test_a_flipped_bit_at_every_byte_of_the_manifest_is_found(store: CheckpointStore) -> None:
    """The manifest guards the other files; this is what guards the manifest, the progress in it included."""
    file = store.folder / "step-00000007" / NAME
    good = file.read_bytes()
    for place in range(len(good)):
        bad = bytearray(good)
        bad[place] ^= 1
        file.write_bytes(bytes(bad))
        assert problems_of(file.parent), f"byte {place}: {good[place : place + 1]!r}"


def test_what_the_manifest_does_not_name_is_no_damage(store: CheckpointStore) -> None:
    folder = store.folder / "step-00000007"
    for name in ("rank-0001-000.safetensors", ".DS_Store"):
        (folder / name).touch()
    (folder / ".nfs0001").mkdir()
    assert problems_of(folder) == []
    assert surplus_in(folder) == [".DS_Store", ".nfs0001", "rank-0001-000.safetensors"]
    assert store.newest_whole() == (folder, [])


def out_of_reach(monkeypatch: pytest.MonkeyPatch, file: Path, number: int) -> None:
    """Storage does not give this file, whoever asks."""
    real = os.open

    def fails(path: Any, *args: Any, **options: Any) -> Any:
        if Path(str(path)) == file:
            raise OSError(number, os.strerror(number), str(path))
        return real(path, *args, **options)

    monkeypatch.setattr(os, "open", fails)


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE], ids=errno.errorcode.get)
@pytest.mark.parametrize("name", [NAME, "a.bin"])
def test_a_checkpoint_that_cannot_be_read_is_passed_over_and_left_as_it_is(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    newest = commit(store, 9)
    with monkeypatch.context() as storage:
        out_of_reach(storage, newest / name, number)
        whole, complaints = store.newest_whole()
        assert whole == store.folder / "step-00000007"
        said = f"checkpoint {newest} cannot be read, is passed over and left as it is: "
        assert len(complaints) == 1 and complaints[0].startswith(said) and os.strerror(number) in complaints[0]
        store.supersede_after(7)
        with pytest.raises(CheckpointError, match="step-00000009 cannot be read: "):
            store.named(newest)
    assert steps_of(store) == [7, 9]
    assert store.newest_whole() == (newest, []), "and counts again when storage is back"


def test_damage_beside_a_file_that_cannot_be_read_does_not_count_yet(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same storage may have lost sight of both."""
    newest = commit(store, 9)
    (newest / "b.bin").unlink()
    with monkeypatch.context() as storage:
        out_of_reach(storage, newest / "a.bin", errno.EIO)
        store.newest_whole()
    assert steps_of(store) == [7, 9]
    store.newest_whole()
    assert steps_of(store) == [7]


def test_a_run_whose_checkpoints_cannot_be_read_does_not_begin_anew(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(3, 2)
    out_of_reach(monkeypatch, store.folder / "step-00000007" / "tensors.json", errno.EIO)
    with pytest.raises(CheckpointError, match=r"none can be used, so the run does not go on(.|\n)*Input/output error"):
        load_into(model, torch.optim.AdamW(model.parameters()), "auto", store, World.alone())


def test_what_cannot_be_read_is_not_deleted_for_having_no_metric(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = commit(store, 8, metric=0.1)
    commit(store, 9, metric=0.5)
    with monkeypatch.context() as storage:
        out_of_reach(storage, best / NAME, errno.ESTALE)
        store.retire(keep_best=1, mode="min")
    assert store.best_whole("min") == (best, [])


def test_each_problem_is_named(store: CheckpointStore) -> None:
    folder = commit(store, 9)
    (folder / "a.bin").unlink()
    (folder / "b.bin").write_text("cut")
    assert problems_of(folder) == ["a.bin is missing", "b.bin has 3 bytes instead of 13"]
    (folder / "b.bin").write_text("Weights b.bin")
    assert problems_of(folder)[1] == "b.bin has changed: its checksum does not match"
    (folder / NAME).unlink()
    assert problems_of(folder) == ["there is no manifest, so it was never finished"]
    (folder / NAME).write_text("{")
    assert problems_of(folder)[0].startswith("the manifest cannot be read: ")
    for text in ("[]", "{}", '{"version": 0}', '{"version": "2"}'):
        (folder / NAME).write_text(text)
        assert problems_of(folder) == ["the manifest is not of version 1"]
    (folder / NAME).write_text('{"version": 1, "files": {}, "about": {}}')
    assert problems_of(folder) == ["the manifest has changed: its checksum does not match"]


def test_a_damaged_checkpoint_is_set_aside_and_not_deleted(store: CheckpointStore) -> None:
    newest = commit(store, 9)
    (newest / "a.bin").write_text("Weights a.bin")
    before = contents(newest)
    whole, complaints = store.newest_whole()
    assert whole == store.folder / "step-00000007"
    assert complaints == [
        f"checkpoint {newest} is damaged and set aside as damaged-step-00000009: "
        "a.bin has changed: its checksum does not match"
    ]
    assert contents(store.folder / "damaged-step-00000009") == before
    assert steps_of(store) == [7]
    assert store.newest_whole() == (whole, []), "it is complained about once"


def test_a_step_damaged_twice_is_kept_twice(store: CheckpointStore) -> None:
    for content in ("first", "second"):
        (commit(store, 9, content=content) / "b.bin").unlink()
        store.newest_whole()
    kept = [
        (store.folder / name / "a.bin").read_text() for name in ("damaged-step-00000009", "damaged-step-00000009-1")
    ]
    assert kept == ["first a.bin", "second a.bin"]


def test_where_all_are_damaged_there_is_none_and_all_are_named(store: CheckpointStore) -> None:
    commit(store, 9)
    for found in store.every():
        (found.path / NAME).unlink()
    whole, complaints = store.newest_whole()
    assert whole is None
    assert ["step-00000009" in complaints[0], "step-00000007" in complaints[1]] == [True, True]


# ---------------------------------------------------------------- kept


def test_a_step_that_is_written_again_replaces_the_old_one(store: CheckpointStore) -> None:
    path = commit(store, 7, metric=0.5, content="again")
    assert path == store.folder / "step-00000007"
    assert contents(path).keys() == {"a.bin", "b.bin", *FILES}
    assert read_manifest(path)["about"]["metric"] == 0.5
    assert [item.name for item in store.folder.iterdir()] == ["step-00000007"]


def test_checkpoints_are_listed_by_step_and_nothing_else_is_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (100_000_000, 9, 20):
        commit(store, step)
    for name in ("step-5", "step-00000005-old", "notes", ".writing-step-00000005", ".deleting-step-00000005"):
        (tmp_path / name).mkdir()
    assert steps_of(store) == [9, 20, 100_000_000]


def test_a_store_whose_folder_is_not_there_has_no_checkpoints(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "nowhere")
    assert store.every() == []
    assert store.newest_whole() == (None, [])
    with pytest.raises(CheckpointError, match=r"there is no checkpoint .*nowhere"):
        store.best_whole("min")


METRICS = {10: 0.5, 20: 0.1, 30: 0.9, 40: 0.3, 50: 0.7}


@pytest.mark.parametrize(
    ("mode", "keep_best", "kept", "best"),
    [
        ("min", 0, [50], 20),
        ("min", 1, [20, 50], 20),
        ("min", 2, [20, 40, 50], 20),
        ("max", 1, [30, 50], 30),
        ("max", 2, [30, 50], 30),
        ("max", 3, [10, 30, 50], 30),
        ("min", 9, [10, 20, 30, 40, 50], 20),
    ],
)
def test_the_best_few_and_the_last_are_kept(
    tmp_path: Path, mode: str, keep_best: int, kept: list[int], best: int
) -> None:
    store = CheckpointStore(tmp_path)
    for step, metric in METRICS.items():
        commit(store, step, metric)
    assert store.best_whole(mode) == (store.place(best), [])
    store.retire(keep_best=keep_best, mode=mode)
    assert steps_of(store) == kept
    assert len(list(tmp_path.iterdir())) == len(kept), "what goes leaves nothing behind"


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("metric", [None, math.nan])
def test_a_checkpoint_without_a_metric_is_never_the_best(tmp_path: Path, mode: str, metric: float | None) -> None:
    store = CheckpointStore(tmp_path)
    for step, value in {10: metric, 20: 0.5, 30: metric, 40: 0.1, 50: 0.9, 60: metric}.items():
        commit(store, step, value)
    best = {"min": 40, "max": 50}[mode]
    assert store.best_whole(mode) == (store.place(best), [])
    store.retire(keep_best=1, mode=mode)
    assert steps_of(store) == [best, 60]


def test_of_two_equal_metrics_the_earlier_is_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (10, 20, 30):
        commit(store, step, 0.5)
    store.retire(keep_best=1, mode="max")
    assert steps_of(store) == [10, 30]


def test_a_crash_while_one_is_deleted_leaves_nothing_that_counts_or_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path)
    for step in (10, 20):
        commit(store, step)

    def crash(_: Path) -> None:
        raise Crash

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", crash)
        with pytest.raises(Crash):
            store.retire(keep_best=0, mode="min")
    assert steps_of(store) == [20]
    commit(store, 10)
    store.retire(keep_best=0, mode="min")
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000020"]


# ---------------------------------------------------------------- named by the user


def test_a_run_its_checkpoints_and_one_step_are_all_names_of_a_checkpoint(store: CheckpointStore) -> None:
    newest = commit(store, 9)
    older = store.folder / "step-00000007"
    elsewhere = CheckpointStore(Path("elsewhere"))
    assert elsewhere.named(store.folder.parent) == (newest, [])
    assert elsewhere.named(store.folder) == (newest, [])
    assert elsewhere.named(older) == (older, [])


def test_a_path_that_is_not_there_is_no_checkpoint(store: CheckpointStore) -> None:
    for path in (store.folder / "step-00000099", Path("nonsense"), store.folder / "step-00000007" / NAME):
        with pytest.raises(CheckpointError) as caught:
            store.named(path)
        assert str(caught.value) == f"there is no checkpoint {path}"


def test_a_folder_without_checkpoints_is_told_so(store: CheckpointStore, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(CheckpointError) as caught:
        store.named(empty)
    assert str(caught.value) == f"there is no whole checkpoint in {empty}"


def test_a_damaged_step_named_by_itself_is_refused_and_left_where_it_is(store: CheckpointStore) -> None:
    path = store.folder / "step-00000007"
    (path / "tensors.json").unlink()
    with pytest.raises(CheckpointError) as caught:
        store.named(path)
    assert str(caught.value) == f"checkpoint {path} is damaged: tensors.json is missing"
    assert path.is_dir()


def test_a_run_with_damaged_checkpoints_only_is_told_about_each(store: CheckpointStore) -> None:
    (store.folder / "step-00000007" / "tensors.json").unlink()
    with pytest.raises(CheckpointError) as caught:
        store.named(store.folder.parent)
    first, last = str(caught.value).splitlines()
    assert first.endswith("step-00000007 is damaged: tensors.json is missing")
    assert last == f"there is no whole checkpoint in {store.folder}"
    assert steps_of(store) == [7], "nothing is gained by another name"


def test_an_entry_is_the_size_and_the_checksum(tmp_path: Path) -> None:
    (tmp_path / "abc").write_bytes(b"abc")
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # of "abc", from FIPS 180-2
    assert entry_of(tmp_path / "abc") == FileEntry(3, digest)
