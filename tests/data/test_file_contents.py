"""Which files are the same, and how little of them is read to know it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from shardwise.data import file_contents as module
from shardwise.data.file_contents import file_contents


def groups(files: list[Path]) -> set[frozenset[str]]:
    numbers = file_contents(files).tolist()
    return {
        frozenset(file.name for file, other in zip(files, numbers, strict=True) if other == number)
        for number in numbers
    }


def test_copies_and_links_are_one_and_files_that_differ_in_a_byte_are_two(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 1000)
    (tmp_path / "copy").write_bytes(b"x" * 1000)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    os.link(tmp_path / "a", tmp_path / "hard")
    (tmp_path / "longer").write_bytes(b"x" * 1001)
    (tmp_path / "other").write_bytes(b"x" * 500 + b"y" + b"x" * 499)
    (tmp_path / "empty").write_bytes(b"")
    files = sorted(tmp_path.iterdir())
    assert groups(files) == {frozenset({"a", "copy", "hard", "link"}), frozenset({"longer"}), frozenset({"other"}),
                             frozenset({"empty"})}  # fmt: skip
    assert groups(files[::-1]) == groups(files)


def test_large_files_that_agree_at_their_ends_and_in_the_middle_are_compared_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PIECE", 16)
    content = bytes(np.random.default_rng(0).integers(0, 256, 4000, dtype=np.uint8))
    for name, place in (("a", None), ("copy", None), ("quarter", 1000), ("first", 0), ("middle", 2000), ("last", 3999)):
        changed = bytearray(content)
        if place is not None:
            changed[place] ^= 1
        (tmp_path / name).write_bytes(changed)
    assert groups(sorted(tmp_path.iterdir())) == {
        frozenset({"a", "copy"}), frozenset({"quarter"}), frozenset({"first"}), frozenset({"middle"}), frozenset({"last"}),
    }  # fmt: skip


def test_little_is_read_of_files_that_differ_and_never_more_than_the_limit_of_those_that_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PIECE", 16)
    monkeypatch.setattr(module, "WHOLE", 160)
    read: dict[str, int] = {}
    original = module._digest

    def counting(file: Path, ranges: list[tuple[int, int]]) -> bytes:
        read[file.name] = read.get(file.name, 0) + sum(last - first for first, last in ranges)
        return original(file, ranges)

    monkeypatch.setattr(module, "_digest", counting)
    draw = np.random.default_rng(0)
    (tmp_path / "alone").write_bytes(b"x" * 10)
    for name in ("one", "two"):
        (tmp_path / name).write_bytes(draw.bytes(4000))
    for name in ("huge", "its copy"):
        (tmp_path / name).write_bytes(b"y" * 100_000)
    assert frozenset({"huge", "its copy"}) in groups(sorted(tmp_path.iterdir()))
    assert read == {"one": 48, "two": 48, "huge": 48 + 160, "its copy": 48 + 160}
