"""How the cells of a micro-batch lie in its tensors: as padded rows, or packed, end to end in one row.

Which cells are in it, their order, and what is hidden and counted are the same in both. In NumPy, whose small operations cost
a tenth of PyTorch's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shardwise.kernels.sizes import packed_longest, packed_size
from shardwise.tasks.cells.rows import Ints
from shardwise.tasks.cells.tokens import NO_PLACE, NOT_HIDDEN, PAD, CellBatch

BY_TOKEN = ("genes", "bins", "values", "hidden", "targets")


def laid_out(batch: CellBatch, *, packs: bool, max_tokens: int) -> dict[str, Any]:
    """As the model takes it. `full`: no cell is padded, so that attention needs no mask; `starts`: the cells are packed."""
    lengths = np.count_nonzero(batch["genes"].numpy() != PAD, axis=1)
    if (lengths == batch["genes"].shape[1]).all():
        return batch | {"full": True}
    return _packed(batch, lengths, max_tokens) if packs else dict(batch)


def _packed(batch: CellBatch, lengths: Ints, max_tokens: int) -> dict[str, Any]:
    """One row. What is left at its end is a text of padding, never empty, so that there is always one more than there are
    cells; `starts` says where each begins, and where the last ends."""
    size = packed_size(lengths.tolist())
    tail = size - int(lengths.sum())
    starts = np.concatenate([[0], np.cumsum([*lengths, tail])])
    width = batch["genes"].shape[1]
    real = np.flatnonzero(np.arange(width) < lengths[:, None])
    rows: dict[str, NDArray[Any]] = {}
    for name in BY_TOKEN:
        if name in batch:
            array = batch[name].numpy()
            row = rows[name] = np.full((1, size), NOT_HIDDEN if name == "targets" else 0, array.dtype)
            row[0, : len(real)] = array.ravel()[real]
    if not rows.keys() & {"bins", "values"}:  # elsewhere the order of genes means nothing
        # Padding stays at position 0: it may be longer than the positions that the model knows.
        rows["positions"] = np.zeros((1, size), np.int64)
        rows["positions"][0, : len(real)] = real % width
    places = batch["places"].numpy()
    found = (places + starts[: len(lengths), None])[places != NO_PLACE]
    rows["places"] = np.full((1, packed_size([len(found)])), NO_PLACE, np.int64)
    rows["places"][0, : len(found)] = found
    rows["starts"] = starts.astype(np.int32)
    rest = {name: tensor for name, tensor in batch.items() if name not in rows}
    longest = packed_longest([*lengths.tolist(), tail], max_tokens)
    return {**rest, **{name: torch.from_numpy(row) for name, row in rows.items()}, "longest": longest}


def padding_share(batch: dict[str, Any]) -> float:
    """How much of what the model computes on is padding."""
    return float((batch["genes"] == PAD).float().mean())
