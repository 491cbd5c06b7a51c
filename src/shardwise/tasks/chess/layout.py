"""How the games of a micro-batch lie in its tensors: as padded rows, or packed, end to end in one row.

Which games are in it, their order and what they count are the same in both.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from shardwise.kernels.sizes import packed_longest, packed_size

IGNORED = -100
"""The target of a token that predicts nothing."""


def padded(texts: Sequence[list[int]], pad_id: int) -> dict[str, Any]:
    """Rows padded on the right to the longest; targets are the next tokens, padding ignored."""
    longest = max(map(len, texts))
    ids = torch.full((len(texts), longest), pad_id)
    targets = torch.full((len(texts), longest), IGNORED)
    for row, text in enumerate(texts):
        tokens = torch.tensor(text)
        ids[row, : len(tokens)] = tokens
        targets[row, : len(tokens) - 1] = tokens[1:]
    return {"ids": ids, "targets": targets}


def packed(texts: Sequence[list[int]], pad_id: int, max_seq_len: int) -> dict[str, Any]:
    """One row. What is left at its end is a text of padding, never empty, so that there is always one more than there are
    games; `starts` says where each begins, and where the last ends."""
    lengths = list(map(len, texts))
    size = packed_size(lengths)
    tail = size - sum(lengths)
    # In NumPy, whose small operations cost a tenth of PyTorch's.
    starts = np.cumsum([0, *lengths, tail])
    ids = np.full(size, pad_id)
    ids[: size - tail] = np.fromiter(itertools.chain(*texts), np.int64, size - tail)
    targets = np.roll(ids, -1)
    targets[starts[1:-1] - 1] = IGNORED
    targets[starts[-2] :] = IGNORED
    positions = np.arange(size) - np.repeat(starts[:-1], [*lengths, tail])
    positions[starts[-2] :] = 0  # of padding, which may be longer than the positions that the model knows
    return {
        "ids": torch.from_numpy(ids)[None],
        "targets": torch.from_numpy(targets)[None],
        "positions": torch.from_numpy(positions)[None],
        "starts": torch.from_numpy(starts.astype(np.int32)),
        "longest": packed_longest([*lengths, tail], max_seq_len),
    }


def padding_share(lengths: Sequence[int], *, packs: bool) -> float:
    """How much of what the model computes on is padding, in a micro-batch of games of these lengths."""
    size = packed_size(lengths) if packs else len(lengths) * max(lengths)
    return 1 - sum(lengths) / size
