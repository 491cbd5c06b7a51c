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


def contents_of(value: Any) -> dict[str, str]:
    found: dict[str, str] = {}
    _walk(value, "", found, 1, _bytes)
    return found


def values_of(value: Any, fewest_bytes: int) -> dict[str, str]:
    """The same for equal numbers of other types. `fewest_bytes`: what is shorter is left out."""
    found: dict[str, str] = {}
    _walk(value, "", found, fewest_bytes, as_values)
    return found


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


def _walk(value: Any, place: str, found: dict[str, str], fewest: int, as_array: Callable[[Any], NDArray[Any]]) -> None:
    if isinstance(value, Tensor | np.ndarray):
        numbers = as_array(value)
        if numbers.nbytes >= fewest:
            found[place] = hashlib.blake2b(numbers.tobytes(), digest_size=16).hexdigest()
    elif isinstance(value, str | bytes):
        if len(value) >= fewest:
            found[place] = str(value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _walk(item, f"{place}.{key}", found, fewest, as_array)
    elif isinstance(value, Sequence):
        if len(value) >= fewest and all(isinstance(item, int | float) for item in value):
            found[place] = repr(value)
            return
        for number, item in enumerate(value):
            _walk(item, f"{place}.{number}", found, fewest, as_array)
    elif hasattr(value, "__dict__"):
        _walk(vars(value), place, found, fewest, as_array)
