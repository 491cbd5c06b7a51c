"""What the voxels of an image are like: the range and spread of each channel, and a digest by which copies are found."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

SAMPLE = 2**18
"""Voxels from which the bulk is estimated."""
TAIL = 0.001
"""The share of the voxels at either end that is no part of the bulk."""


@dataclass(frozen=True)
class Intensities:
    """Of one channel."""

    lowest: float
    """NaN if one of the voxels is."""
    highest: float
    deviation: float
    bulk: float
    """How far apart the values are of all voxels but the highest, the lowest (one of which may stand for what was not
    measured) and TAIL of the others. NaN where nothing is left."""


def intensities_of(voxels: NDArray[Any]) -> list[Intensities]:
    """Of each channel of [x, y, z] or [x, y, z, channels]."""
    channels = [voxels] if voxels.ndim == 3 else [voxels[..., number] for number in range(voxels.shape[3])]
    with np.errstate(all="ignore"):  # of NaN and infinity, which are named as what they are
        return [_intensities(channel) for channel in channels]


def digest_of(voxels: NDArray[Any]) -> str:
    """The same for the same numbers, of whatever type, and for 3 dimensions or a fourth with one channel."""
    whole = voxels if voxels.ndim == 4 else voxels[..., None]
    digest = hashlib.sha256(repr(whole.shape).encode())
    with np.errstate(all="ignore"):
        for channel in range(whole.shape[3]):
            for plane in range(whole.shape[2]):  # in pieces: a whole copy of a scan is large
                numbers = whole[:, :, plane, channel].astype("<f4") + np.float32(0)  # -0.0 is 0.0
                digest.update(numbers.tobytes(order="F"))
    return digest.hexdigest()[:32]


def _intensities(channel: NDArray[Any]) -> Intensities:
    lowest, highest = float(channel.min()), float(channel.max())
    means, variances = [], []
    for plane in range(channel.shape[2]):
        values = channel[:, :, plane].astype(np.float64)
        means.append(values.mean())
        variances.append(values.var())
    deviation = float(np.sqrt(np.mean(variances) + np.var(means)))
    sample = channel.ravel(order="K")
    if sample.size > SAMPLE:
        sample = sample[np.random.default_rng(0).integers(0, sample.size, SAMPLE)]
    inner = sample[(sample > lowest) & (sample < highest)]
    bulk = float(np.diff(np.quantile(inner.astype(np.float64), [TAIL, 1 - TAIL]))[0]) if inner.size else float("nan")
    return Intensities(lowest, highest, deviation, bulk)
