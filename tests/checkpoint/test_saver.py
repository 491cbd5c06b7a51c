"""Checkpoints written while training goes on: what they hold, what becomes of failures, and that none can run code."""

from __future__ import annotations

import json
import pickle
import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint import state_dict_saver

from shardwise.checkpoint import CheckpointStore, Saver, load_into, load_model
from shardwise.checkpoint import saver as saver_room
from shardwise.checkpoint import state as state_room
from shardwise.checkpoint import tensors as tensors_room
from shardwise.checkpoint.inspect import condition_of_checkpoint
from shardwise.data.manifest import NAME, entry_of, problems_of, read_manifest, write_manifest
from shardwise.engine import checkpointing
from shardwise.errors import CheckpointError
from shardwise.parallel import World
from tests.tasks import config_of


def about(step: int) -> dict[str, Any]:
    return {"step": step, "cursor": {"epoch": 0, "consumed": 4 * step}, "metric": None}


def trained(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model with tensors of three types, buffers, a tensor without elements and one that is a single number."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2).to(torch.bfloat16))
    model.register_buffer("empty", torch.zeros(0, 4))
    model.register_buffer("flags", torch.tensor([True, False, True]))
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    return model, optimizer


def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    hidden = model[1](model[0](torch.randn(4, 3)))
    model[2](hidden.to(torch.bfloat16)).float().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def copied(model: nn.Module) -> dict[str, Any]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints")


@pytest.fixture
def saver(store: CheckpointStore) -> Saver:
    return Saver(store, World.alone(), lambda: None)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Nothing is written before it is opened."""
    opened, write = threading.Event(), state_room.write_staged

    def gated(*args: Any) -> Path:
        assert opened.wait(30)
        return write(*args)

    monkeypatch.setattr(saver_room, "write_staged", gated)
    yield opened
    opened.set()


# ---------------------------------------------------------------- what it holds


def test_a_checkpoint_holds_the_step_it_was_asked_at_although_training_goes_on(
    store: CheckpointStore, saver: Saver, gate: threading.Event
) -> None:
    model, optimizer = trained()
    before = copied(model)
    saver.save(model, optimizer, 1, about(1))
    step(model, optimizer)
    assert saver.finished() == [], "it is under way"
    assert store.every() == []
    gate.set()
    (written,) = saver.wait()
    assert (written.step, written.problem, written.path) == (1, None, store.place(1))
    assert not same(before, copied(model))
    other, _ = trained(seed=1)
    load_model(other, written.path)
    assert same(before, copied(other))


def test_weights_buffers_and_moments_come_back_bit_for_bit(store: CheckpointStore, saver: Saver) -> None:
    model, optimizer = trained()
    saver.save(model, optimizer, 1, about(1))
    saver.wait()
    other, moments = trained(seed=1)
    assert load_into(other, moments, "auto", store, World.alone()) == store.place(1)
    assert read_manifest(store.place(1))["about"] == about(1)
    assert same(copied(model), copied(other))
    for mine, theirs in zip(optimizer.state.values(), moments.state.values(), strict=True):
        assert same(mine, theirs)
    for _ in range(2):
        torch.manual_seed(7)
        step(model, optimizer)
        torch.manual_seed(7)
        step(other, moments)
    assert same(copied(model), copied(other)), "and the next steps are the same"


def test_the_files_are_plain_safetensors_of_which_any_tool_can_read_the_weights(saver: Saver) -> None:
    model, optimizer = trained()
    saver.save(model, optimizer, 1, about(1))
    (written,) = saver.wait()
    found = load_file(written.path / "rank-0000-000.safetensors")
    assert same({f"model.{name}": value for name, value in copied(model).items()},
                {name: value for name, value in found.items() if name.startswith("model.")})  # fmt: skip


@pytest.mark.parametrize("limit", [1, 50, 150])
def test_a_large_state_is_spread_over_several_files(
    store: CheckpointStore, saver: Saver, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(tensors_room, "FILE_BYTES", limit)
    model, optimizer = trained()
    saver.save(model, optimizer, 1, about(1))
    (written,) = saver.wait()
    assert len(list(written.path.glob("*.safetensors"))) > 3
    other, _ = trained(seed=1)
    load_model(other, written.path)
    assert same(copied(model), copied(other))


class Remembers(nn.Linear):
    """A module that keeps something which is no tensor."""

    note: Any = None

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state


def test_what_is_no_tensor_comes_back_too(saver: Saver) -> None:
    model, other = Remembers(2, 2), Remembers(2, 2)
    model.note, other.note = "seen: 12", "seen: 0"
    optimizer = torch.optim.SGD(model.parameters())
    saver.save(model, optimizer, 1, about(1))
    (written,) = saver.wait()
    assert written.problem is None
    load_model(other, written.path)
    assert other.note == model.note


# ---------------------------------------------------------------- one at a time


def test_a_second_one_waits_for_the_first_so_that_there_is_never_more_than_one_copy(
    store: CheckpointStore, saver: Saver, gate: threading.Event
) -> None:
    model, optimizer = trained()
    saver.save(model, optimizer, 1, about(1))
    memory = saver._stage.files[0].body[0].data_ptr()
    second = threading.Thread(target=lambda: saver.save(model, optimizer, 2, about(2)))
    second.start()
    second.join(0.2)
    assert second.is_alive(), "it waits"
    gate.set()
    second.join(30)
    assert [written.step for written in saver.wait()] == [1, 2]
    assert saver._stage.files[0].body[0].data_ptr() == memory
    assert [found.step for found in store.every()] == [1, 2]


def test_who_writes_what_is_agreed_once_and_anew_when_there_are_other_tensors(
    store: CheckpointStore, saver: Saver, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = trained()
    planned: list[int] = []
    save = state_dict_saver.save
    monkeypatch.setattr(state_room, "save", lambda *args, **more: (planned.append(1), save(*args, **more)))
    for number in (1, 2, 3):
        if number == 3:
            model.register_buffer("later", torch.arange(5))
        step(model, optimizer)
        saver.save(model, optimizer, number, about(number))
        expected = copied(model)
        (written,) = saver.wait()
        assert written.problem is None
        other, _ = trained(seed=1)
        if number == 3:
            other.register_buffer("later", torch.zeros(5, dtype=torch.int64))
        load_model(other, written.path)
        assert same(expected, copied(other))
        assert len(planned) == (2 if number == 3 else 1)


def test_training_that_waits_for_slow_storage_is_alive_but_not_for_ever(
    store: CheckpointStore, gate: threading.Event
) -> None:
    beats: list[float] = []

    def alive() -> None:
        beats.append(time.monotonic())
        if len(beats) == 2:
            gate.set()

    saver = Saver(store, World.alone(), lambda: None, alive, patience=60.0)
    saver.save(*trained(), 1, about(1))
    saver.wait()
    assert len(beats) == 2
    gate.clear()
    beats.clear()
    impatient = Saver(store, World.alone(), lambda: None, alive, patience=0.0)
    impatient.save(*trained(), 2, about(2))
    assert impatient.wait(0.1) == [] and beats == [], "whoever watches will say that it hangs"
    gate.set()
    assert impatient.wait()[0].problem is None


# ---------------------------------------------------------------- failures


def test_a_full_disk_is_told_and_leaves_the_last_good_one_and_no_half_of_another(
    store: CheckpointStore, saver: Saver
) -> None:
    model, optimizer = trained()
    saver.save(model, optimizer, 1, about(1))
    saver.wait()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))  # the kernel refuses to make any file longer
    try:
        saver.save(model, optimizer, 2, about(2))
        (written,) = saver.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert written.problem is not None
    assert written.problem.startswith("the checkpoint of step 2 could not be written to ")
    assert "rank 0: [Errno 27] File too large" in written.problem
    assert [path.name for path in store.folder.iterdir()] == ["step-00000001"]
    assert problems_of(store.place(1)) == []
    saver.save(model, optimizer, 3, about(3))
    assert saver.wait()[0].problem is None, "the next one is tried as if nothing had been"


def test_a_mistake_in_the_thread_is_not_lost(saver: Saver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saver_room, "write_staged", lambda *_: 1 / 0)
    saver.save(*trained(), 1, about(1))
    assert saver.wait()[0].problem == "ZeroDivisionError('division by zero')"


def test_old_ones_that_cannot_be_removed_do_not_make_the_new_one_a_failure(store: CheckpointStore) -> None:
    def stuck() -> None:
        raise PermissionError("not yours")

    saver = Saver(store, World.alone(), stuck)
    saver.save(*trained(), 1, about(1))
    assert saver.wait()[0].problem is None
    assert store.place(1).is_dir()


# ---------------------------------------------------------------- nothing in it is code


class Payload:
    """Unpickled, it would leave a file behind."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return (Path.touch, (self.trace,))


def reseal(folder: Path) -> None:
    """As somebody would who means harm: the manifest fits the files again."""
    about = read_manifest(folder)["about"]
    files = {file.name: entry_of(file) for file in folder.iterdir() if file.name != NAME}
    write_manifest(folder, files, about)


def test_a_hostile_pickle_in_a_checkpoint_is_not_executed(saver: Saver, tmp_path: Path) -> None:
    model = Remembers(2, 2)
    model.note = Payload(tmp_path / "trace")
    saver.save(model, torch.optim.SGD(model.parameters()), 1, about(1))
    (written,) = saver.wait()
    with pytest.raises(CheckpointError, match="Weights only load failed"):
        load_model(Remembers(2, 2), written.path)
    assert not (tmp_path / "trace").exists()
    pickle.loads(pickle.dumps(Payload(tmp_path / "trace")))
    assert (tmp_path / "trace").exists(), "the payload would have worked"


class Grows:
    """Unpickled, it takes as much memory as it likes."""

    def __reduce__(self) -> Any:
        return (bytearray, (2**34,))


def test_what_is_kept_besides_tensors_takes_no_more_memory_than_it_has_bytes(saver: Saver) -> None:
    model = Remembers(2, 2)
    model.note = (1, "x")
    saver.save(model, torch.optim.SGD(model.parameters()), 1, about(1))
    again = Remembers(2, 2)
    load_model(again, saver.wait()[0].path)
    assert again.note == (1, "x")
    model.note = Grows()
    saver.save(model, torch.optim.SGD(model.parameters()), 2, about(2))
    with pytest.raises(CheckpointError, match="what is kept besides tensors is not as a checkpoint has it"):
        load_model(Remembers(2, 2), saver.wait()[0].path)


@pytest.mark.parametrize("content", [b"\x80\x04N.", b"[]", b"{", b'{"a": 1}', b'{"model.x": {"dtype": "F99"}}'])
def test_an_index_that_is_none_is_refused(saver: Saver, content: bytes) -> None:
    saver.save(*trained(), 1, about(1))
    (written,) = saver.wait()
    (written.path / "tensors.json").write_bytes(content)
    reseal(written.path)
    with pytest.raises(CheckpointError):
        load_model(trained()[0], written.path)


def test_an_index_cannot_name_files_outside_the_checkpoint(saver: Saver, tmp_path: Path) -> None:
    saver.save(*trained(), 1, about(1))
    (written,) = saver.wait()
    file = written.path / "tensors.json"
    (written.path / "rank-0000-000.safetensors").rename(tmp_path / "outside.safetensors")
    file.write_text(file.read_text().replace("rank-0000-000", "../../outside"))
    reseal(written.path)
    assert condition_of_checkpoint(written.path).damage == [
        "tensors.json is not an index of tensors: '../../outside.safetensors' is not the name of a file in the checkpoint"
    ]
    with pytest.raises(CheckpointError, match="is not the name of a file in the checkpoint"):
        load_model(trained()[0], written.path)


def test_a_manifest_cannot_name_files_outside_its_folder(saver: Saver, tmp_path: Path) -> None:
    saver.save(*trained(), 1, about(1))
    (written,) = saver.wait()
    (tmp_path / "outside").write_text("x")
    beside = "which is not the name of a file beside it"
    files = {name: entry_of(written.path / name) for name in json.loads((written.path / NAME).read_text())["files"]}
    write_manifest(written.path, {**files, "../../outside": entry_of(tmp_path / "outside")}, {})
    assert problems_of(written.path) == [f"the manifest lists '../../outside', {beside}"]
    write_manifest(written.path, {**files, "/etc/passwd": entry_of(Path("/etc/passwd"))}, {})
    assert problems_of(written.path) == [f"the manifest lists '/etc/passwd', {beside}"]


def test_the_stall_is_what_training_waited_and_not_what_writing_took(saver: Saver, gate: threading.Event) -> None:
    began = time.perf_counter()
    saver.save(*trained(), 1, about(1))
    returned = time.perf_counter() - began
    gate.set()
    (written,) = saver.wait()
    assert 0 < written.stall <= returned
    assert written.seconds >= written.stall


def test_too_little_host_memory_is_told_once_before_the_first_checkpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from shardwise.engine.session import Session

    text = "task: tests.tasks:Ragged\ntraining: {batch_size: 4}\n"
    for free, warned in ((2**40, False), (1000, True)):
        monkeypatch.setattr(checkpointing, "host_memory", lambda free=free: (free, 2**40))
        with Session(config_of(text, [f"run_dir={tmp_path}"])) as session:
            session.prepare()
            session.step(next(session.batches()))
            path = session.save()
            assert path.exists() or not warned, "without room it is in place when training goes on"
            session.save()
        said = "host memory has no room for a copy of a checkpoint"
        warnings = [each for each in caplog.records if each.levelname == "WARNING" and said in each.getMessage()]
        assert len(warnings) == warned, "once"


def test_without_room_for_a_copy_it_is_written_piece_by_piece_before_training_goes_on(
    store: CheckpointStore, saver: Saver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensors_room, "PIECE_BYTES", 7)
    tight = Saver(CheckpointStore(tmp_path / "tight"), World.alone(), lambda: None, room=lambda: 100)
    model, optimizer = trained()
    model[0].weight.data = model[0].weight.data.T.contiguous().T  # type: ignore[index]
    path = tight.save(model, optimizer, 1, about(1))
    assert problems_of(path) == [] and tight.made_wait
    assert tight._stage._buffers == [], "no memory was taken"
    saver.save(model, optimizer, 1, about(1))
    step(model, optimizer)  # which changes neither
    (written,), (copied_one,) = tight.wait(), saver.wait()
    assert not saver.made_wait and written.stall == written.seconds
    files = [each.name for each in path.iterdir() if each.suffix == ".safetensors"]
    assert files and all((path / name).read_bytes() == (copied_one.path / name).read_bytes() for name in files)


def test_memory_that_is_held_already_is_room_enough(tmp_path: Path) -> None:
    room = 2**30
    saver = Saver(CheckpointStore(tmp_path), World.alone(), lambda: None, room=lambda: room)
    model, optimizer = trained()
    saver.save(model, optimizer, 1, about(1))
    room = 0
    saver.save(model, optimizer, 2, about(2))
    assert not saver.made_wait
    saver.wait()
