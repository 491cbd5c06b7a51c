"""Prediction of whole volumes with a sliding window, in a number of model calls that does not depend on the volumes.

Under fsdp every call of the model is a collective. Volumes of different size need different numbers of windows, so a
rank with small volumes calls the model some more times, on nothing, or the others would wait for it for ever.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

WINDOWS_PER_CALL = 4


def predict_volumes(
    model: nn.Module, images: Sequence[Tensor], size: Sequence[int], overlap: float, calls: int
) -> Iterator[Tensor]:
    """Logits of one image [1, channels, x, y, z] after the other. By the end, the model has been called `calls` times."""
    from monai.inferers import sliding_window_inference

    made = 0

    def predict(windows: Tensor) -> Tensor:
        nonlocal made
        made += 1
        return model(windows)

    for image in images:
        yield sliding_window_inference(image, size, WINDOWS_PER_CALL, predict, overlap=overlap, mode="gaussian")
    nothing = torch.zeros(1, images[0].shape[1], *size, device=images[0].device)
    for _ in range(calls - made):
        model(nothing)


def calls_for(shape: Sequence[int], size: Sequence[int], overlap: float) -> int:
    """How often the model is called for a volume of this shape. The windows are laid as MONAI lays them."""
    from monai.data.utils import dense_patch_slices

    padded = [max(sides) for sides in zip(shape, size, strict=True)]
    steps = [
        side if side == whole else max(1, int(side * (1 - overlap))) for side, whole in zip(size, padded, strict=True)
    ]
    return math.ceil(len(dense_patch_slices(padded, list(size), steps)) / WINDOWS_PER_CALL)
