"""Which samples are held out for validation, where the data does not say so itself: a share, chosen by the seed."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from shardwise.config.seeds import Purpose


def hold_out(number: int, share: float, seed: int, *group: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Indices to train on and indices held out, both ascending: about `share` of them, but at least one on either side.

    A single sample is for training. `group` tells apart what is split by itself, such as each class of images.
    """
    order = np.random.default_rng([seed, Purpose.SPLIT, *group]).permutation(number)
    count = min(number - 1, max(1, round(share * number)))
    return np.sort(order[count:]), np.sort(order[:count])


def copies_together(
    kept: NDArray[np.intp], held_out: NDArray[np.intp], contents: Sequence[Hashable]
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """The same split, but for copies: they go where the first of them is, so that none is trained on and validated on. Where
    that would leave one side empty, nothing is moved."""
    numbers: dict[Hashable, int] = {}
    first = np.array([numbers.setdefault(content, index) for index, content in enumerate(contents)], np.intp)
    out = np.zeros(len(contents), bool)
    out[held_out] = True
    out = out[first]
    if out.all() or not out.any():
        return kept, held_out
    return np.flatnonzero(~out), np.flatnonzero(out)
