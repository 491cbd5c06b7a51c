"""What may be wrong with a file of metadata: by its structure, by its bytes, or because something else lies in its place.

Everything follows from the random numbers that are handed in, so that a seed makes the same mistake again.
"""

from __future__ import annotations

import copy
import json
import os
import random
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Raw:
    """Text of JSON as it stands, for what no value of Python is written as."""

    text: str


@dataclass
class Pairs:
    """A block, in which a key may stand twice."""

    items: list[tuple[str, Any]]


def as_tree(value: Any) -> Any:
    """What JSON has, with blocks as pairs."""
    if isinstance(value, dict):
        return Pairs([(key, as_tree(each)) for key, each in value.items()])
    return [as_tree(each) for each in value] if isinstance(value, list) else value


def as_text(tree: Any) -> str:
    if isinstance(tree, Raw):
        return tree.text
    if isinstance(tree, Pairs):
        return "{" + ", ".join(f"{json.dumps(key)}: {as_text(each)}" for key, each in tree.items) + "}"
    if isinstance(tree, list):
        return "[" + ", ".join(map(as_text, tree)) + "]"
    return json.dumps(tree)


# ---------------------------------------------------------------- by structure

NUMBERS = [
    "-1", "-0", "0", "1", "2", "7", "255", "4096", "2147483648", "9223372036854775807", "9223372036854775808",
    "18446744073709551616", "1" + "0" * 40, "9" * 5000, "0.5", "1.0", "-1.5", "1e3", "1e308", "1e999", "-1e999", "NaN",
    "Infinity", "-Infinity", "010", "0x10", "1_000", "+1", ".5",
]  # fmt: skip
TEXTS = [
    "", " ", "x", "..", ".", "../x", "/etc/passwd", "a/b", "a\\b", "manifest.json", "tensors.json", "rank-0000-000.safetensors",
    "rank-0001-000.safetensors", "F32", "F64", "I64", "U8", "BOOL", "F99", "é", "ｘ", "\u202e", "😀", "\x00", "\x1b[2J",
    "\n", "x\ny", "a" * 300, "a" * 100_000, "\u2028", "e\u0301", "null", "true", "1", "__metadata__", "model.weight",
]  # fmt: skip
SURROGATES = ['"\\ud800"', '"a\\udfffb"', '"\\ud83d\\ude00"', '"\\u0000"']
DEPTHS = [2, 10, 30, 100, 1_000, 20_000]


def _of_another_type(rng: random.Random) -> Any:
    return rng.choice([None, True, False, 0, 1, -1, 1.5, "", "text", [], Pairs([]), [None], [[]], Pairs([("a", 1)])])


def _nested(rng: random.Random) -> Raw:
    depth = rng.choice(DEPTHS)
    begin, end = rng.choice([("[", "]"), ('{"a": ', "}"), ('[{"a": ', "}]")])
    return Raw(begin * depth + "1" + end * depth)


def _wide(rng: random.Random) -> Raw:
    each = rng.choice(["0", "[]", "{}", '""', '[[0], [1], "rank-0000-000.safetensors"]'])
    return Raw("[" + ", ".join([each] * rng.choice([3, 100, 2_000, 20_000])) + "]")


def _near(value: Any, rng: random.Random) -> Any:
    """A value like the one that is there."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice([value + 1, value - 1, -value, 2 * value, value // 2, value + 8, float(value), str(value)])
    if isinstance(value, float):
        return rng.choice([-value, 2 * value, int(value) if abs(value) < 1e9 else 0, str(value)])
    if isinstance(value, str) and value:
        place = rng.randrange(len(value))
        return rng.choice(
            [value[:place], value + "x", value.upper(), value[::-1], value[:place] + "é" + value[place + 1 :], [value]]
        )
    return value


VALUES: dict[str, Callable[[Any, random.Random], Any]] = {
    "another type": lambda value, rng: _of_another_type(rng),
    "another number": lambda value, rng: Raw(rng.choice(NUMBERS)),
    "another text": lambda value, rng: rng.choice(TEXTS),
    "half of a pair": lambda value, rng: Raw(rng.choice(SURROGATES)),
    "nested": lambda value, rng: _nested(rng),
    "wide": lambda value, rng: _wide(rng),
    "nearly the same": _near,
    "wrapped": lambda value, rng: [value],
}
HOLDERS = ("drop", "repeat", "another key", "a key more", "exchange", "reverse")


def places(tree: Any) -> list[tuple[Any, int]]:
    """Every place of a value: what holds it, and which of its values it is."""
    found: list[tuple[Any, int]] = []
    if isinstance(tree, Pairs | list):
        inner = [each for _, each in tree.items] if isinstance(tree, Pairs) else tree
        for number, each in enumerate(inner):
            found.append((tree, number))
            found += places(each)
    return found


def mutated_tree(value: Any, rng: random.Random) -> tuple[str, str]:
    """One to three mistakes in the structure: the text of JSON, and what was done."""
    root = [as_tree(copy.deepcopy(value))]
    done = []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        holder, number = rng.choice(places(root))
        change = rng.choice([*VALUES, *HOLDERS])
        done.append(change)
        if change in VALUES:
            _put(holder, number, VALUES[change](_get(holder, number), rng))
        elif holder is not root:
            _rearrange(holder, number, change, rng)
    return as_text(root[0]), ", ".join(done)


def _get(holder: Any, number: int) -> Any:
    return holder.items[number][1] if isinstance(holder, Pairs) else holder[number]


def _put(holder: Any, number: int, value: Any) -> None:
    if isinstance(holder, Pairs):
        holder.items[number] = holder.items[number][0], value
    else:
        holder[number] = value


def _rearrange(holder: Any, number: int, change: str, rng: random.Random) -> None:
    held: list[Any] = holder.items if isinstance(holder, Pairs) else holder
    other = rng.randrange(len(held))
    if change == "drop":
        del held[number]
    elif change == "repeat":
        held.insert(other, copy.deepcopy(held[number]))
    elif change == "exchange":
        first, second = _get(holder, number), _get(holder, other)
        _put(holder, number, second)
        _put(holder, other, first)
    elif change == "reverse":
        held.reverse()
    elif isinstance(holder, Pairs):
        key = rng.choice([*TEXTS, *(key for key, _ in holder.items)])
        if change == "another key":
            held[number] = key, held[number][1]
        else:
            held.insert(other, (key, _of_another_type(rng)))


# ---------------------------------------------------------------- by bytes


def mutated_bytes(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    change = rng.choice(list(BYTES))
    return BYTES[change](data, rng), change


def _flipped(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 8])):
        if changed:
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _inserted(data: bytes, rng: random.Random) -> bytes:
    place = rng.randint(0, len(data))
    more = rng.choice(
        [b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"[" * 5_000, b'"', b"\\", b"}", b"\n", rng.randbytes(16)]
    )
    return data[:place] + more + data[place:]


def _spans(data: bytes, rng: random.Random) -> tuple[bytes, bytes, bytes]:
    begin, end = sorted((rng.randint(0, len(data)), rng.randint(0, len(data))))
    return data[:begin], data[begin:end], data[end:]


def _without_a_span(data: bytes, rng: random.Random) -> bytes:
    first, _, last = _spans(data, rng)
    return first + last


def _with_a_span_twice(data: bytes, rng: random.Random) -> bytes:
    first, middle, last = _spans(data, rng)
    return first + middle + middle + last


BYTES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "bits flipped": _flipped,
    "cut": lambda data, rng: data[: rng.randrange(len(data) + 1)],
    "bytes inserted": _inserted,
    "a span left out": _without_a_span,
    "a span twice": _with_a_span_twice,
    "empty": lambda data, rng: b"",
    "zeros": lambda data, rng: b"\x00" * len(data),
    "noise": lambda data, rng: rng.randbytes(len(data)),
    "UTF-16": lambda data, rng: data.decode(errors="replace").encode("utf-16"),
    "something after it": lambda data, rng: data + rng.choice([b"\n", b" ", b"x", b"{}", b"\x00"]),
}

# ---------------------------------------------------------------- lines of YAML

SCALARS = [
    "010", "-010", "08", "0o10", "1:30", "190:20:30", "1_000", "1_0", "0x1F", "0b11", "on", "off", "yes", "No", "~", "null",
    "2026-11-19", "2026-99-99", "2026-11-19 10:00:00", "1e-4", "1e999", ".inf", "-.inf", ".nan", "9" * 5000, "0x" + "f" * 5000,
    "-1", "0", "1.5", "true", "text", '""', '"\\0"', '"\\ud800"', "é", "😀", "!!python/object/apply:os.getcwd []",
    "!!binary aGk=",
    "!!int '010'", "!!str 010", "!mine x", "*nobody", "&a [*a]", "&a x", "[]", "{}", "[1, 2", "{a: 1, a: 2}", "[[[[1]]]]",
    "[" * 1000, "{a: " * 200 + "1" + "}" * 200, "x" * 50_000, "'", "|\n  x", "? [a]\n  : b", "<<", "%", "@", "`", "\t1",
]  # fmt: skip
LAUGHS = "laughs: [&a [ha, ha, ha], " + ", ".join(
    f"&{name} [{', '.join([f'*{before}'] * 9)}]" for before, name in zip("abcdefghi", "bcdefghij", strict=True)
)
BLOCKS = [
    f"{LAUGHS}]",
    "merged: {<<: {a: 1}}",
    "base: &base {a: 1}\nmore: {<<: [*base, *base]}",
    "---\ntask: chess",
    "...",
    "%YAML 1.2\n---",
    "- a list",
    "\tx: 1",
    "x: 1\n x: 2",
    "deep: " + "{a: " * 60 + "1" + "}" * 60,
    "\n".join("  " * depth + f"k{depth}:" for depth in range(200)),
    "many: [" + ", ".join(["1"] * 3_000) + "]",
    "# a comment",
]


def mutated_yaml(text: str, rng: random.Random) -> tuple[str, str]:
    """One to three lines that are wrong."""
    lines, done = text.splitlines(), []
    for _ in range(rng.choice([1, 1, 2, 3])):
        change = rng.choice(list(LINES))
        done.append(change)
        number = rng.randrange(len(lines)) if lines else 0
        if lines:
            lines[number : number + 1] = LINES[change](lines[number], rng)
    if rng.random() < 0.2:
        done.append("lines exchanged")
        rng.shuffle(lines)
    return "\n".join(lines) + "\n", ", ".join(done)


def _another_value(line: str, rng: random.Random) -> list[str]:
    key, colon, _ = line.partition(":")
    return [f"{key}: {rng.choice(SCALARS)}" if colon else rng.choice(SCALARS)]


def _another_key(line: str, rng: random.Random) -> list[str]:
    indent = line[: len(line) - len(line.lstrip())]
    _, colon, value = line.partition(":")
    return [indent + rng.choice([*SCALARS, "task", "data", "training", "seed", "lr"]) + colon + value]


LINES: dict[str, Callable[[str, random.Random], list[str]]] = {
    "another value": _another_value,
    "another value of that": _another_value,
    "another key": _another_key,
    "a line left out": lambda line, rng: [],
    "a line twice": lambda line, rng: [line, line],
    "indented otherwise": lambda line, rng: [" " * rng.randrange(6) + line.lstrip()],
    "a block more": lambda line, rng: [line, rng.choice(BLOCKS)],
    "cut": lambda line, rng: [line[: rng.randrange(len(line) + 1)]],
}

# ---------------------------------------------------------------- something else in the place of a file


def put_in_place(file: Path, elsewhere: Path, rng: random.Random) -> str:
    """`elsewhere`: a folder outside, where what links point to may lie."""
    change = rng.choice(list(IN_PLACE))
    data = file.read_bytes()
    file.unlink()
    IN_PLACE[change](file, data, elsewhere)
    return change


def _linked(file: Path, data: bytes, elsewhere: Path) -> None:
    (elsewhere / "copy").write_bytes(data)
    file.symlink_to(elsewhere / "copy")


def _socket(file: Path, data: bytes, elsewhere: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(os.path.relpath(file))  # a name of a socket has 107 bytes at most


def _sparse(file: Path, data: bytes, elsewhere: Path) -> None:
    file.write_bytes(data)
    os.truncate(file, 2**36)


def _hard_link(file: Path, data: bytes, elsewhere: Path) -> None:
    _linked(file, data, elsewhere)
    file.unlink()
    os.link(elsewhere / "copy", file)


def _folder(file: Path, data: bytes, elsewhere: Path) -> None:
    file.mkdir()
    (file / "x").write_bytes(data)


IN_PLACE: dict[str, Callable[[Path, bytes, Path], None]] = {
    "nothing": lambda file, data, elsewhere: None,
    "a link to a copy": _linked,
    "a hard link to a copy": _hard_link,
    "a link to nothing": lambda file, data, elsewhere: file.symlink_to("nowhere"),
    "a link to itself": lambda file, data, elsewhere: file.symlink_to(file.name),
    "a link to /dev/zero": lambda file, data, elsewhere: file.symlink_to("/dev/zero"),
    "a link to /dev/stdin": lambda file, data, elsewhere: file.symlink_to("/dev/stdin"),
    "a pipe": lambda file, data, elsewhere: os.mkfifo(file),
    "a socket": _socket,
    "a folder": _folder,
    "64 GiB of nothing": _sparse,
    "an empty file": lambda file, data, elsewhere: file.touch(),
}
