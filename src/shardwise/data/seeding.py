"""Seeding the usual generators from a key, so that a resumed run draws what the uninterrupted one would have."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def seed_everything(*key: int) -> None:
    """Seed every generator that a model may draw from, those of the devices included. The key says what for."""
    first, second = np.random.SeedSequence(key).generate_state(2)
    random.seed(int(first))
    np.random.seed(first)
    torch.manual_seed(int(second))


def seed_host(*key: int) -> None:
    """What is drawn on the host from here on follows from the key; the devices' generators are left alone."""
    first, second = np.random.SeedSequence(key).generate_state(2)
    random.seed(int(first))
    np.random.seed(first)
    torch.default_generator.manual_seed(int(second))


@contextmanager
def generators_kept() -> Iterator[None]:
    """Afterwards the host's generators are as they were. That takes longer than seeding them: once per batch, not sample."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


@contextmanager
def all_generators_kept(device: torch.device) -> Iterator[None]:
    """Those of the host, and that of the device."""
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    with generators_kept():
        try:
            yield
        finally:
            if state is not None:
                torch.cuda.set_rng_state(state, device)


def random_bits(
    key: tuple[int, ...],
    samples: NDArray[np.integer],
    places: NDArray[np.integer],
    *,
    repeats: NDArray[np.integer] | None = None,
) -> NDArray[np.uint32]:
    """32 random bits for each (sample, place): a function of these and the key alone, for whole arrays at once.

    What is drawn for a sample does not depend on which samples stand beside it, as it would with a generator. `repeats`
    says how many of the places belong to each sample, where they stand one after the other.
    """
    of_samples = _of_samples(key, samples)
    if repeats is not None:
        of_samples = np.repeat(of_samples, repeats)
    return _mixed(places.astype(np.uint32) * _STRIDE + of_samples, _MURMUR)


def places_of(key: tuple[int, ...], samples: NDArray[np.integer], bits: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """The reverse: no two places of a sample have the same bits, so the bits tell the place."""
    return (_mixed(bits.copy(), _MURMUR_BACK) - _of_samples(key, samples)) * _STRIDE_BACK


def _of_samples(key: tuple[int, ...], samples: NDArray[np.integer]) -> NDArray[np.uint32]:
    start = np.random.SeedSequence(key).generate_state(1, np.uint64)
    return _mixed(samples.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + start, _SPLITMIX).astype(np.uint32)


# The finalisers of splitmix64 and murmur3: every bit of the input changes every bit of the output with a chance of half.
# Each step can be undone: x ^= x >> s by itself (s ≥ 16 of 32) or by doing it twice as far once more, a product by the
# inverse factor.
_SPLITMIX = (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9), np.uint64(27), np.uint64(0x94D049BB133111EB), np.uint64(31))
_MURMUR = (np.uint32(16), np.uint32(0x85EBCA6B), np.uint32(13), np.uint32(0xC2B2AE35), np.uint32(16))
_STRIDE = np.uint32(0x9E3779B9)


def _inverse(factor: np.uint32) -> np.uint32:
    return np.uint32(pow(int(factor), -1, 2**32))


_STRIDE_BACK = _inverse(_STRIDE)
_MURMUR_BACK = (_MURMUR[4], _inverse(_MURMUR[3]), _MURMUR[2], _inverse(_MURMUR[1]), _MURMUR[0])


def _mixed(bits: NDArray[Any], recipe: tuple[Any, Any, Any, Any, Any]) -> NDArray[Any]:
    first, multiplier, second, another, third = recipe
    bits ^= bits >> first
    bits *= multiplier
    bits ^= bits >> second
    if recipe is _MURMUR_BACK:  # a shift below half of the width takes a second step back
        bits ^= bits >> (second + second)
    bits *= another
    bits ^= bits >> third
    return bits
