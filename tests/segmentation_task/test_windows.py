from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shardwise.tasks.segmentation.windows import calls_for, predict_volumes


class Counting(nn.Module):
    """Gives back what it gets, and remembers how often it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, windows: Tensor) -> Tensor:
        self.calls += 1
        return windows


@pytest.mark.parametrize("overlap", [0.0, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("shape", [(16, 16, 16), (8, 20, 16), (33, 17, 40), (5, 5, 5), (64, 16, 16)])
def test_the_number_of_calls_is_known_beforehand(shape: tuple[int, int, int], overlap: float) -> None:
    model = Counting()
    list(predict_volumes(model, [torch.zeros(1, 1, *shape)], (16, 16, 16), overlap, calls=0))
    assert model.calls == calls_for(shape, (16, 16, 16), overlap)


def test_the_model_is_called_as_often_for_small_volumes_as_for_large_ones() -> None:
    small, large = torch.rand(1, 1, 16, 16, 16), torch.rand(1, 1, 40, 33, 20)
    calls = 2 * calls_for((40, 33, 20), (16, 16, 16), 0.25)
    for images in ([small], [large], [small, large], [large, large]):
        model = Counting()
        predicted = list(predict_volumes(model, images, (16, 16, 16), 0.25, calls))
        assert model.calls == calls
        for image, prediction in zip(images, predicted, strict=True):
            torch.testing.assert_close(prediction, image)
