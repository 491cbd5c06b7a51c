"""Fingerprints: of the arrays in a sample or a batch by their place there, and of tensors by name."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.data.fingerprint import as_values
from shardwise.verify.names import canonical

SKETCH = 4
"""Sums. For all of them to hide a difference, it would have to be at right angles to four directions drawn at random."""
LAST_DIGITS = 4e-6
"""Of the whole array's size: some 30 units of fp32, which a library's sums differ by from process to process (torch's FFT, with
where in memory its input lies)."""


def contents_of(value: Any) -> dict[str, str]:
    found: dict[str, str] = {}
    _walk(value, "", found, 1, _bytes)
    return found


def values_of(value: Any, fewest_bytes: int) -> dict[str, str]:
    """The same for equal numbers of other types. `fewest_bytes`: what is shorter is left out."""
    found: dict[str, str] = {}
    _walk(value, "", found, fewest_bytes, as_values)
    return found


def sketches_of(value: Any) -> dict[str, list[float]]:
    """Of every array of floating-point numbers a few sums of all of them, each with other signs. Those of arrays that differ in
    their last digits alone are nearly the same."""
    arrays: dict[str, Any] = {}
    _walk(value, "", arrays, 1, as_values, lambda numbers: numbers)
    return {
        place: _sketch(each)
        for place, each in arrays.items()
        if isinstance(each, np.ndarray) and each.dtype.kind == "f"
    }


def _sketch(numbers: NDArray[Any]) -> list[float]:
    row = np.nan_to_num(numbers.reshape(-1).astype(np.float64), nan=1.0, posinf=2.0, neginf=-2.0)
    signs = np.random.default_rng(0)
    return [
        float(np.linalg.norm(row)),
        *(float(row @ (2.0 * signs.integers(0, 2, len(row)) - 1.0)) for _ in range(SKETCH)),
    ]


def nearly_the_same(one: Sequence[float], other: Sequence[float]) -> bool:
    size = max(one[0], other[0])
    return len(one) == len(other) and all(abs(a - b) <= LAST_DIGITS * size for a, b in zip(one, other, strict=True))


def first_difference(one: Mapping[str, str], other: Mapping[str, str]) -> str | None:
    """The place of it, in words."""
    place = next((place for place in [*one, *other] if one.get(place) != other.get(place)), None)
    return None if place is None else (place.removeprefix(".") or "the tensor itself")


def digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: digest(tensor) for name, tensor in tensors.items()}


def local(tensor: Tensor) -> Tensor:
    """The part of it that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """On the host, put together where they are sharded. All ranks come here together."""
    parts = ((name, each.detach()) for name, each in named)
    gathered = ((name, each.full_tensor() if isinstance(each, DTensor) else each) for name, each in parts)
    return {canonical(name): each.cpu().clone() for name, each in gathered}


def digest(tensor: Tensor) -> str:
    return hashlib.blake2b(_bytes(tensor).tobytes(), digest_size=16).hexdigest()


def _bytes(array: Tensor | NDArray[Any]) -> NDArray[Any]:
    if not isinstance(array, Tensor):
        return np.ascontiguousarray(array)
    # Cloned: storage that numpy has seen cannot be given back and taken anew, as fully_shard does (torch 2.13).
    numbers: NDArray[Any] = array.detach().cpu().contiguous().clone().reshape(-1).view(torch.uint8).numpy()
    return numbers


def _hashed(numbers: NDArray[Any]) -> str:
    return hashlib.blake2b(numbers.tobytes(), digest_size=16).hexdigest()


def _walk(
    value: Any,
    place: str,
    found: dict[str, Any],
    fewest: int,
    as_array: Callable[[Any], NDArray[Any]],
    kept: Callable[[NDArray[Any]], Any] = _hashed,
) -> None:
    if isinstance(value, Tensor | np.ndarray):
        numbers = as_array(value)
        if numbers.nbytes >= fewest:
            found[place] = kept(numbers)
    elif isinstance(value, str | bytes):
        if len(value) >= fewest:
            found[place] = str(value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _walk(item, f"{place}.{key}", found, fewest, as_array, kept)
    elif isinstance(value, Sequence):
        if len(value) >= fewest and all(isinstance(item, int | float) for item in value):
            found[place] = repr(value)
            return
        for number, item in enumerate(value):
            _walk(item, f"{place}.{number}", found, fewest, as_array, kept)
    elif hasattr(value, "__dict__"):
        _walk(vars(value), place, found, fewest, as_array, kept)
