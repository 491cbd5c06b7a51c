"""A manifest, an index or a header may have been written by anybody, checksum and all: what they promise is there, or nothing is
used."""

from __future__ import annotations

import hashlib
import json
import math
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save
from torch import nn

from shardwise.checkpoint import CheckpointStore, load_into, load_model
from shardwise.checkpoint.index import Chunk, IndexEntry, read_header
from shardwise.checkpoint.inspect import condition_of_checkpoint
from shardwise.cli import main
from shardwise.config.plain_files import NotPlain, open_plain, parse_json, plain_size, read_plain
from shardwise.data import manifest as manifest_room
from shardwise.data.manifest import NAME, FileEntry, entry_of, problems_of, read_manifest, write_manifest
from shardwise.errors import CheckpointError
from shardwise.parallel import World

INDEX, FIRST, SECOND = "tensors.json", "rank-0000-000.safetensors", "rank-0001-000.safetensors"
WEIGHT = torch.arange(12.0).view(4, 3)
Json = dict[str, Any]


def index_of() -> Json:
    """One tensor that two ranks share, and one that the second has alone."""
    parts = [[[0, 0], [3, 3], FIRST], [[3, 0], [1, 3], SECOND]]
    return {
        "model.weight": {"dtype": "F32", "shape": [4, 3], "chunks": parts},
        "model.bias": {"dtype": "F32", "shape": [4], "chunks": [[[0], [4], SECOND]]},
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoints" / "step-00000007"
    folder.mkdir(parents=True)
    (folder / FIRST).write_bytes(save({"model.weight[0,0]": WEIGHT[:3].clone()}))
    (folder / SECOND).write_bytes(save({"model.weight[3,0]": WEIGHT[3:].clone(), "model.bias": torch.ones(4)}))
    (folder / INDEX).write_text(json.dumps(index_of()))
    list_anew(folder)
    return folder


def list_anew(folder: Path, names: tuple[str, ...] = (INDEX, FIRST, SECOND)) -> None:
    """As somebody would who means harm: the manifest fits the files again."""
    write_manifest(folder, {name: entry_of(folder / name) for name in names}, {"metric": None})


def problem_of(folder: Path) -> str:
    condition = condition_of_checkpoint(folder)
    assert condition.unreadable == []
    (problem,) = condition.damage
    return problem


def test_a_whole_one_is_whole_and_loads(path: Path) -> None:
    assert condition_of_checkpoint(path).problems == []
    model = nn.Linear(3, 4)
    load_model(model, path)
    assert torch.equal(model.weight, WEIGHT) and torch.equal(model.bias, torch.ones(4))


def test_ranks_that_share_the_look_find_what_one_finds(path: Path) -> None:
    (path / FIRST).write_bytes(save({"model.weight[0,0]": WEIGHT[:2].clone()}))
    (path / SECOND).write_bytes(save({"model.bias": torch.ones(4)}))
    list_anew(path)
    alone = condition_of_checkpoint(path).damage
    shared = [problem for rank in range(3) for problem in condition_of_checkpoint(path, part=(rank, 3)).damage]
    assert sorted(shared) == sorted(alone) and len(alone) == 2


def test_everybody_who_loads_looks(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path / SECOND).write_bytes(save({"model.bias": torch.ones(4)}))
    list_anew(path)
    said = f"{SECOND} does not hold 'model.weight[3,0]', which {INDEX} promises"
    assert main(["checkpoint", "verify", str(path.parent)]) == 1
    assert said in capsys.readouterr().out
    store, model = CheckpointStore(path.parent), nn.Linear(3, 4)
    with pytest.raises(CheckpointError, match="is damaged"):  # as export asks
        store.named(path)
    with pytest.raises(CheckpointError, match="is damaged"):
        load_into(model, torch.optim.SGD(model.parameters()), str(path), store, World.alone())
    whole, complaints = store.newest_whole()
    assert whole is None and said in complaints[0]


# ---------------------------------------------------------------- the manifest


def rewrite(path: Path, change: Callable[[Json], Any]) -> None:
    """The manifest, changed and sealed as it should be."""
    content = json.loads((path / NAME).read_text())
    del content["sha256"]
    content = change(content) or content
    digest = hashlib.sha256(json.dumps(content, indent=1).encode()).hexdigest()
    (path / NAME).write_text(json.dumps({**content, "sha256": digest}, indent=1))


def test_an_empty_list_is_not_whole(path: Path) -> None:
    rewrite(path, lambda content: content.update(files={}))
    assert problem_of(path) == "the manifest lists no files"


@pytest.mark.parametrize("left_out", [INDEX, FIRST, SECOND])
def test_every_file_that_is_read_is_in_the_manifest(path: Path, left_out: str) -> None:
    list_anew(path, tuple({INDEX, FIRST, SECOND} - {left_out}))
    said = problem_of(path)
    assert left_out in said and "the manifest does not list" in said


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "a/b", ".", "..", "", ".hidden", "x\n", "x\u202e", "ü", "x" * 300]
)
def test_a_manifest_names_files_beside_it_alone(path: Path, name: str) -> None:
    rewrite(path, lambda content: content["files"].update({name: content["files"][FIRST]}))
    assert problem_of(path).startswith(f"the manifest lists {name[:40]!r}"[:40])


@pytest.mark.parametrize("size", [-1, 1.0, "12", None, True, 2**63, math.nan, math.inf, [1]])
def test_a_size_is_a_number_of_bytes(path: Path, size: Any) -> None:
    rewrite(path, lambda content: content["files"][FIRST].update(size=size))
    assert problem_of(path) == f"the manifest does not have size and checksum of {FIRST}"


@pytest.mark.parametrize("digest", ["", "0" * 63, "Z" * 64, 5, None, ["0" * 64]])
def test_a_checksum_is_one(path: Path, digest: Any) -> None:
    rewrite(path, lambda content: content["files"][FIRST].update(sha256=digest))
    assert problem_of(path) == f"the manifest does not have size and checksum of {FIRST}"


@pytest.mark.parametrize("key", ["files", "about"])
@pytest.mark.parametrize("value", [None, [], "x", 1])
def test_its_parts_are_blocks(path: Path, key: str, value: Any) -> None:
    rewrite(path, lambda content: content.update({key: value}))
    assert problem_of(path) == "the manifest has no list of files"


@pytest.mark.parametrize("depth", [30, 100_000])
def test_what_is_nested_too_deeply_is_one_problem(path: Path, depth: int) -> None:
    (path / NAME).write_text("[" * depth + "]" * depth)
    assert problem_of(path) == "the manifest cannot be read: its lists and blocks are nested too deeply"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": 1, "a": 2}', "the key 'a' is given twice"),
        ('{"a": ' + "9" * 5000 + "}", "Exceeds the limit"),
        ('{"a": "\\ud800"}', "it is not text in UTF-8"),
        ("\ufeff{}", "it is not JSON"),
        ("{", "it is not JSON"),
    ],
)
def test_json_is_read_strictly(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_json(text.encode())
    assert parse_json(b'{"a": "\\ud83d\\ude00", "b": NaN}')["a"] == "😀"


def test_a_manifest_that_is_too_large_is_neither_read_nor_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.truncate(path / NAME, 2**40)
    assert "the manifest cannot be read: manifest.json has 1099511627776 bytes" in problem_of(path)
    monkeypatch.setattr(manifest_room, "MOST_BYTES", 1000)
    with pytest.raises(OSError, match="larger than any that is read"):
        write_manifest(path, {f"{number}.bin": FileEntry(0, "0" * 64) for number in range(100)}, {})


def test_the_checksum_of_a_manifest_is_that_of_its_text(path: Path) -> None:
    content = read_manifest(path)
    (path / NAME).write_text(json.dumps(content))  # the same content, written otherwise
    assert problem_of(path) == "the manifest has changed: its checksum does not match"


# ---------------------------------------------------------------- the index


def change_index(path: Path, change: Callable[[Json], Any]) -> None:
    index = index_of()
    index = change(index) or index
    (path / INDEX).write_text(json.dumps(index))
    list_anew(path)


def chunk(number: int, place: int, value: Any) -> Callable[[Json], None]:
    def change(index: Json) -> None:
        index["model.weight"]["chunks"][number][place] = value

    return change


COVER = "the parts of 'model.weight' in tensors.json are not the whole of it, each number once"
OUTSIDE = "a part of 'model.weight' lies outside of it"
NO_OFFSETS = "a part of 'model.weight' has offsets or sizes that are none"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda index: [1], "not a block of names"),
        (dict.clear, "names no tensor"),
        (lambda index: index.update({"model.weight": 5}), "of 'model.weight' it does not say type, shape and chunks"),
        (lambda index: index["model.weight"].update(more=1), "does not say type, shape and chunks"),
        (lambda index: index["model.weight"].update(dtype="F99"), "is of a type that is not known"),
        (lambda index: index["model.weight"].update(dtype=["F32"]), "is of a type that is not known"),
        (lambda index: index["model.weight"].update(shape=[2**62, 2**62]), "has a shape that no tensor has"),
        (lambda index: index["model.weight"].update(shape=[1] * 65), "has a shape that no tensor has"),
        (lambda index: index["model.weight"].update(shape=[4, -3]), "has a shape that no tensor has"),
        (lambda index: index["model.weight"].update(shape=[4.0, 3]), "has a shape that no tensor has"),
        (lambda index: index["model.weight"].update(chunks=[]), "of 'model.weight' it names no part"),
        (lambda index: index["model.weight"]["chunks"].__delitem__(1), COVER),
        (lambda index: index["model.weight"]["chunks"].append(index["model.weight"]["chunks"][0]), COVER),
        (lambda index: index["model.weight"]["chunks"][0].__delitem__(2), "is not offsets, sizes and a file"),
        (chunk(1, 0, [2, 0]), COVER),
        (chunk(1, 0, [4, 0]), OUTSIDE),
        (chunk(0, 1, [2**62, 3]), OUTSIDE),
        (chunk(0, 0, [-1, 0]), NO_OFFSETS),
        (chunk(0, 0, [0.0, 0]), NO_OFFSETS),
        (chunk(0, 0, [0]), NO_OFFSETS),
        (chunk(0, 0, "00"), NO_OFFSETS),
        (chunk(0, 0, [True, 0]), NO_OFFSETS),
        (chunk(0, 2, "../x"), "'../x' is not the name of a file in the checkpoint"),
        (chunk(0, 2, [["x"]]), "something is not the name of a file in the checkpoint"),
        (chunk(0, 2, "other.safetensors"), "the file 'other.safetensors', which the manifest does not list"),
        (chunk(0, 2, INDEX), "names the file 'tensors.json', which the manifest does not list"),
        (chunk(0, 2, SECOND), f"{SECOND} does not hold 'model.weight[0,0]'"),
        (lambda index: index["model.bias"].update(dtype="I32"), f"{SECOND} holds 'model.bias' as F32, 4, and"),
        (lambda index: index.update({"x": {"bytes": FIRST}}), f"{FIRST} does not hold 'x'"),
        (lambda index: index.update({"model.bias": {"bytes": SECOND}}), f"{SECOND} holds 'model.bias' as F32"),
        (lambda index: index.update({"x": {"bytes": 5}}), "something is not the name of a file"),
    ],
)  # fmt: skip
def test_what_the_index_promises_is_there(path: Path, change: Callable[[Json], Any], said: str) -> None:
    change_index(path, change)
    assert said in "; ".join(condition_of_checkpoint(path).damage)


def test_of_many_problems_some_are_told(path: Path) -> None:
    change_index(path, lambda index: index.update({f"x{n}": {"bytes": FIRST} for n in range(1000)}))
    *_, last = condition_of_checkpoint(path).damage
    assert last == "and 995 more of these"


def entry(shape: tuple[int, ...], *parts: tuple[tuple[int, ...], tuple[int, ...]]) -> IndexEntry:
    return IndexEntry("F32", shape, tuple(Chunk(offsets, sizes, FIRST) for offsets, sizes in parts))


def test_parts_cover_a_tensor_or_do_not() -> None:
    quarters = [((row, column), (2, 3)) for row in (0, 2) for column in (0, 3)]
    assert entry((4, 6), *quarters).is_covered()
    assert entry((4, 6), ((0, 0), (1, 6)), ((1, 0), (3, 2)), ((1, 2), (3, 4))).is_covered()
    assert entry((4, 6), *quarters, ((4, 0), (0, 6))).is_covered(), "a rank that has none of it says so"
    assert not entry((4, 6), *quarters[1:]).is_covered()
    assert not entry((4, 6), *quarters[:-1], quarters[0]).is_covered(), "as many numbers, and not all of them"
    assert entry((), ((), ())).is_covered() and not entry((), ((), ()), ((), ())).is_covered()
    assert entry((0, 3), ((0, 0), (0, 3)), ((0, 0), (0, 3))).is_covered()
    assert not entry((2,) * 20, *[((n,) * 20, (1,) * 20) for n in (0, 1)]).is_covered(), "nobody cuts along twenty axes"


@given(st.lists(st.tuples(*[st.integers(0, 3)] * 4), max_size=6))
def test_a_cover_is_what_counting_every_number_says(parts: list[tuple[int, int, int, int]]) -> None:
    chunks = [((a, b), (min(c, 3 - a), min(d, 3 - b))) for a, b, c, d in parts]
    chunks += [((0, 0), (0, 0))]  # an index never has none
    counts = torch.zeros(3, 3)
    for (a, b), (c, d) in chunks:
        counts[a : a + c, b : b + d] += 1
    assert entry((3, 3), *chunks).is_covered() == bool((counts == 1).all())


# ---------------------------------------------------------------- headers


def file_of(folder: Path, header: Any, body: int, *, length: int | None = None) -> Path:
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    file = folder / "x.safetensors"
    file.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + bytes(body))
    return file


def tensor(begin: Any, end: Any, shape: Any = None, dtype: Any = "F32") -> Json:
    return {"dtype": dtype, "shape": [2] if shape is None else shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "body", "said"),
    [
        ([], 8, "it is not a block of names"),
        ("null  ", 8, "it is not a block of names"),
        (" {}", 0, "it is not a block of names"),
        ({"a": 5}, 8, "of 'a' it does not say type, shape and place"),
        ({"a": {**tensor(0, 8), "more": 1}}, 8, "of 'a' it does not say type, shape and place"),
        ({"a": tensor(0, 8, dtype="F99")}, 8, "'a' has a type or a shape that no tensor has"),
        ({"a": tensor(0, 8, dtype=["F32"])}, 8, "'a' has a type or a shape that no tensor has"),
        ({"a": tensor(0, 8, shape=[2, -1])}, 8, "'a' has a type or a shape that no tensor has"),
        ({"a": tensor(0, 8, shape=[2**40] * 3)}, 8, "'a' has a type or a shape that no tensor has"),
        ({"a": tensor(0, 8, shape=[3])}, 8, "'a' has another number of bytes than its shape"),
        ({"a": tensor(8, 0)}, 8, "'a' has another number of bytes than its shape"),
        ({"a": tensor(-8, 0)}, 8, "'a' has a place that is none"),
        ({"a": tensor(0.0, 8)}, 8, "'a' has a place that is none"),
        ({"a": tensor(0, 8), "b": tensor(4, 12)}, 12, "its tensors overlap, or leave bytes between them"),
        ({"a": tensor(0, 8), "b": tensor(0, 8)}, 8, "its tensors overlap, or leave bytes between them"),
        ({"a": tensor(0, 8), "b": tensor(12, 20)}, 20, "its tensors overlap, or leave bytes between them"),
        ({"a": tensor(0, 8)}, 4, "its tensors have 8 bytes, and the file has 4 for them"),
        ({"a": tensor(0, 8)}, 12, "its tensors have 8 bytes, and the file has 12 for them"),
        ({"a": tensor(0, 8), "__metadata__": {"x": 1}}, 8, "its __metadata__ is not text"),
        ('{"a": 1, "a": 2}', 8, "the key 'a' is given twice"),
        ("[" * 50_000, 8, "nested too deeply"),
    ],
)
def test_a_header_says_what_its_file_has_room_for(tmp_path: Path, header: Any, body: int, said: str) -> None:
    with pytest.raises(ValueError, match=r"x\.safetensors has a header that is wrong: ") as caught:
        read_header(file_of(tmp_path, header, body))
    assert said in str(caught.value)


@pytest.mark.parametrize("length", [0, 1, 1000, 2**31, 2**64 - 1])
def test_a_header_is_no_longer_than_its_file(tmp_path: Path, length: int) -> None:
    with pytest.raises(ValueError, match="has no header of safetensors"):
        read_header(file_of(tmp_path, {"a": tensor(0, 8)}, 8, length=length))


# ---------------------------------------------------------------- what lies there


@pytest.mark.parametrize("name", [NAME, INDEX, FIRST])
@pytest.mark.parametrize("what", ["link", "pipe", "socket", "folder", "device"])
def test_what_is_no_regular_file_is_damage_and_nobody_waits_for_it(
    path: Path, tmp_path: Path, name: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, elsewhere = path / name, tmp_path / "copy"
    file.rename(elsewhere)
    if what == "link":
        file.symlink_to(elsewhere)
    elif what == "pipe":
        os.mkfifo(file)
    elif what == "folder":
        file.mkdir()
    elif what == "device":
        file.symlink_to("/dev/zero")
    else:
        monkeypatch.chdir(path)
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(name)
    kind = "link" if what == "device" else what
    assert f"{name} is a {kind}, and not a file" in problem_of(path)
    assert problem_of(path) in "; ".join(CheckpointStore(path.parent).newest_whole()[1])


def test_a_checkpoint_that_is_a_link_itself_is_one(path: Path, tmp_path: Path) -> None:
    linked = tmp_path / "step-00000007"
    linked.symlink_to(path)
    assert CheckpointStore(path.parent).named(linked) == (linked, [])
    load_model(nn.Linear(3, 4), linked)


def test_a_name_that_becomes_a_link_after_the_look_is_not_followed(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, real = path / FIRST, os.open
    seen: list[str] = []

    def exchanged(name: Any, *args: Any, **options: Any) -> int:
        if Path(str(name)) == file and not seen:
            seen.append(str(name))
            file.rename(tmp_path / "copy")
            file.symlink_to(tmp_path / "copy")
        return real(name, *args, **options)

    monkeypatch.setattr(os, "open", exchanged)
    with pytest.raises(NotPlain):
        open_plain(file)
    assert seen and (tmp_path / "copy").exists()


def test_a_device_is_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "open", lambda *_: pytest.fail("it was opened"))
    with pytest.raises(NotPlain, match="zero is a device, and not a file"):
        open_plain(Path("/dev/zero"), follow=True)


def test_no_more_is_read_than_was_asked_for(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"12345")
    assert (plain_size(tmp_path / "x"), read_plain(tmp_path / "x", 5)) == (5, b"12345")
    with pytest.raises(ValueError, match="x has 5 bytes, and 4 is the most that is read"):
        read_plain(tmp_path / "x", 4)


def test_a_file_cut_short_of_its_header_is_damage_too(path: Path) -> None:
    (path / FIRST).write_bytes(b"1234")
    list_anew(path)
    assert problem_of(path) == f"{FIRST} has no header of safetensors"
    assert problems_of(path) == [], "as far as checksums say"
