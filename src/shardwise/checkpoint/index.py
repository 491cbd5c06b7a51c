"""The index of a checkpoint: of each tensor its type, its shape, and which file has which part of it. And the headers of those
files, which say the same of what they hold. Both may have been written by anybody: nothing in them is believed unseen."""

from __future__ import annotations

import io
import itertools
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardwise.config.plain_files import is_count, open_plain, parse_json, plain_size, read_exactly, read_plain
from shardwise.data.manifest import is_file_name

INDEX = "tensors.json"
SMALL = 2**24
"""Bytes that an index may always have. A larger one has as many parts as the headers of the files have entries."""
MOST_HEADER = 100_000_000
"""Bytes of a header, as safetensors has it."""
MOST_AXES = 8
"""Of a tensor, along which it is cut into parts."""

NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
"""As safetensors writes them."""
TYPES = {name: dtype for dtype, name in NAMES.items()}

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Chunk:
    offsets: Shape
    sizes: Shape
    file: str


@dataclass(frozen=True)
class IndexEntry:
    dtype: str | None
    """As safetensors names it. None: what is kept is no tensor, but its bytes."""
    shape: Shape
    chunks: tuple[Chunk, ...]

    def key_of(self, name: str, chunk: Chunk) -> str:
        """The name that a chunk has in its file."""
        return name if self.dtype is None else chunk_key(name, chunk.offsets, chunk.sizes, self.shape)

    def is_covered(self) -> bool:
        """Whether its parts are all of it, and no two of them overlap.

        Where each corner of each part counts +1 or -1 in turn, those inside cancel out if and only if that is so.
        """
        if not math.prod(self.shape):
            return True
        whole = (0,) * len(self.shape), self.shape
        parts = [(each.offsets, each.sizes) for each in self.chunks if math.prod(each.sizes)]
        axes = [axis for axis in range(len(self.shape)) if any(o[axis] or s[axis] != whole[1][axis] for o, s in parts)]
        if len(axes) > MOST_AXES:
            return False
        return _corners(parts, axes) == _corners([whole], axes)


def chunk_key(name: str, offsets: Iterable[int], sizes: Iterable[int], whole: Iterable[int]) -> str:
    """The name of a tensor in its file: its own, or with its place where the file has a part of it."""
    return name if tuple(sizes) == tuple(whole) else f"{name}[{','.join(map(str, offsets))}]"


def _corners(parts: Iterable[tuple[Shape, Shape]], axes: list[int]) -> dict[Shape, int]:
    counts = Counter[Shape]()
    for offsets, sizes in parts:
        for ends in itertools.product((0, 1), repeat=len(axes)):
            corner = tuple(offsets[axis] + end * sizes[axis] for axis, end in zip(axes, ends, strict=True))
            counts[corner] += (-1) ** sum(ends)
    return {corner: count for corner, count in counts.items() if count}


def read_index(folder: Path) -> dict[str, IndexEntry]:
    """ValueError says what is wrong with it. Whether the files have what it promises is another question."""
    content = parse_json(read_plain(folder / INDEX, _most_bytes(folder)))
    if not isinstance(content, dict):
        raise ValueError("it is not a block of names")
    if not content:
        raise ValueError("it names no tensor")
    return {name: _entry(name, about) for name, about in content.items()}


def _most_bytes(folder: Path) -> int:
    """An entry of a header is about as long as what the index says of the same part."""
    if plain_size(folder / INDEX) <= SMALL:
        return SMALL
    headers = 0
    for file in folder.glob("*.safetensors"):
        with open_plain(file) as stream:
            headers += min(_header_length(stream), plain_size(file))
    return SMALL + 2 * headers


def _entry(name: str, about: Any) -> IndexEntry:
    if isinstance(about, dict) and about.keys() == {"bytes"}:
        _check_name(about["bytes"])
        return IndexEntry(None, (), (Chunk((), (), about["bytes"]),))
    if not isinstance(about, dict) or about.keys() != {"dtype", "shape", "chunks"}:
        raise ValueError(f"of {name!r:.80} it does not say type, shape and chunks")
    dtype, shape, chunks = about["dtype"], about["shape"], about["chunks"]
    if not isinstance(dtype, str) or dtype not in TYPES:
        raise ValueError(f"{name!r:.80} is of a type that is not known")
    if not _is_shape(shape, TYPES[dtype].itemsize):
        raise ValueError(f"{name!r:.80} has a shape that no tensor has")
    if not isinstance(chunks, list) or not chunks:
        raise ValueError(f"of {name!r:.80} it names no part")
    return IndexEntry(dtype, tuple(shape), tuple(_chunk(name, each, shape) for each in chunks))


def _chunk(name: str, about: Any, whole: list[int]) -> Chunk:
    if not isinstance(about, list) or len(about) != 3:
        raise ValueError(f"a part of {name!r:.80} is not offsets, sizes and a file")
    offsets, sizes, file = about
    _check_name(file)
    for numbers in (offsets, sizes):
        if not isinstance(numbers, list) or len(numbers) != len(whole) or not all(map(is_count, numbers)):
            raise ValueError(f"a part of {name!r:.80} has offsets or sizes that are none")
    if any(offset + size > all_of_it for offset, size, all_of_it in zip(offsets, sizes, whole, strict=True)):
        raise ValueError(f"a part of {name!r:.80} lies outside of it")
    return Chunk(tuple(offsets), tuple(sizes), file)


def _check_name(value: Any) -> None:
    if not is_file_name(value):
        shown = f"{value!r:.80}" if isinstance(value, str) else "something"
        raise ValueError(f"{shown} is not the name of a file in the checkpoint")


def _is_shape(value: Any, itemsize: int) -> bool:
    """Of a tensor whose strides and bytes 64 bits can count."""
    if not isinstance(value, list) or len(value) > 64 or not all(map(is_count, value)):
        return False
    return math.prod(max(1, size) for size in value) * itemsize < 2**63


# ---------------------------------------------------------------- headers


@dataclass(frozen=True)
class HeaderEntry:
    dtype: str
    shape: Shape


def read_header(file: Path) -> dict[str, HeaderEntry]:
    """What a file of safetensors says that it holds, which is what it has room for. ValueError says what is wrong."""
    with open_plain(file) as stream:
        size, length = plain_size(file) - 8, _header_length(stream)
        if not 2 <= length <= min(size, MOST_HEADER):
            raise ValueError(f"{file.name} has no header of safetensors")
        data = read_exactly(stream, length)
    try:
        content = parse_json(data)
        if not isinstance(content, dict) or not data.startswith(b"{"):
            raise ValueError("it is not a block of names")
        _check_metadata(content.pop("__metadata__", {}))
        places = {name: _place(name, about) for name, about in content.items()}
        _check_places(sorted(places.values()), size - length)
    except ValueError as error:
        raise ValueError(f"{file.name} has a header that is wrong: {error}") from None
    return {name: HeaderEntry(about["dtype"], tuple(about["shape"])) for name, about in content.items()}


def _header_length(stream: io.FileIO) -> int:
    return int.from_bytes(stream.read(8), "little")


def _check_metadata(value: Any) -> None:
    if not isinstance(value, dict) or not all(isinstance(each, str) for each in value.values()):
        raise ValueError("its __metadata__ is not text")


def _place(name: str, about: Any) -> tuple[int, int]:
    """Where its bytes begin and end."""
    if not isinstance(about, dict) or about.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"of {name!r:.80} it does not say type, shape and place")
    dtype, shape, place = about["dtype"], about["shape"], about["data_offsets"]
    if not isinstance(dtype, str) or dtype not in TYPES or not _is_shape(shape, TYPES[dtype].itemsize):
        raise ValueError(f"{name!r:.80} has a type or a shape that no tensor has")
    if not isinstance(place, list) or len(place) != 2 or not all(map(is_count, place)):
        raise ValueError(f"{name!r:.80} has a place that is none")
    begin, end = place
    if end - begin != math.prod(shape) * TYPES[dtype].itemsize:
        raise ValueError(f"{name!r:.80} has another number of bytes than its shape")
    return begin, end


def _check_places(places: list[tuple[int, int]], size: int) -> None:
    """One after the other, from the first byte to the last."""
    at = 0
    for begin, end in places:
        if begin != at:
            raise ValueError("its tensors overlap, or leave bytes between them")
        at = end
    if at != size:
        raise ValueError(f"its tensors have {at} bytes, and the file has {size} for them")
