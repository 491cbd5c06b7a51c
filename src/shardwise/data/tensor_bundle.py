"""Several tensors as one: what a worker hands over costs by the piece, not by the byte.

Every tensor that comes from another process is a file descriptor, sent over a socket after a handshake (torch 2.13).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 64


@dataclass(frozen=True)
class TensorBundle:
    buffer: Tensor
    places: dict[str, tuple[torch.dtype, tuple[int, ...], int]]
    """Of every tensor its type, its shape and where it begins in the buffer."""

    def pin_memory(self) -> TensorBundle:
        return TensorBundle(self.buffer.pin_memory(), self.places)

    def unpacked(self) -> dict[str, Tensor]:
        """Views of the buffer."""
        tensors = {}
        for name, (dtype, shape, begin) in self.places.items():
            size = int(np.prod(shape)) * dtype.itemsize
            tensors[name] = self.buffer[begin : begin + size].view(dtype).view(shape)
        return tensors


def bundle(batch: Any) -> Any:
    """A dict of tensors in one buffer; anything else as it is."""
    if not isinstance(batch, dict) or not all(isinstance(value, Tensor) for value in batch.values()):
        return batch
    places, end = {}, 0
    for name, tensor in batch.items():
        places[name] = (tensor.dtype, tuple(tensor.shape), end)
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    buffer = torch.empty(end, dtype=torch.uint8)
    packed = TensorBundle(buffer, places)
    for name, place in packed.unpacked().items():
        place.copy_(batch[name])
    return packed


def unbundle(batch: Any) -> Any:
    return batch.unpacked() if isinstance(batch, TensorBundle) else batch
