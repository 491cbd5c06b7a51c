"""Ways in which the kernels have been broken, each a claim that must hold."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from shardwise.kernels.cross_entropy import linear_cross_entropy
from shardwise.kernels.low_precision_weights import LowPrecisionWeights
from shardwise.kernels.regions import Regions, compile_regions


class Teacher(nn.Module):
    """As MoCo and BYOL: the forward pass moves a frozen copy after the trained weights."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)

    def forward(self, given: Tensor) -> Tensor:
        with torch.no_grad():
            for mine, its in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                mine.mul_(0.5).add_(its, alpha=0.5)
        return self.student(given) - self.teacher(given)


def test_what_a_forward_pass_writes_into_frozen_weights_stays_there() -> None:
    model = Teacher()
    before = model.teacher.weight.clone()
    narrow = LowPrecisionWeights(model, torch.bfloat16)
    with narrow.in_place(), torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.randn(2, 4))
    assert not torch.equal(model.teacher.weight, before)


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.share = nn.Parameter(torch.rand(8))

    def forward(self, given: Tensor) -> Tensor:
        return torch.lerp(given, -given, self.share)


@pytest.mark.parametrize(
    "model", [parametrizations.spectral_norm(nn.Linear(8, 8)), Mixing()], ids=["spectral_norm", "lerp"]
)
def test_what_computes_under_autocast_computes_with_narrow_copies(model: nn.Module) -> None:
    model.eval()  # where spectral_norm leaves its own estimate alone
    given = torch.randn(2, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        usual = model(given)
        with LowPrecisionWeights(model, torch.bfloat16).in_place():
            narrow = model(given)
    torch.testing.assert_close(narrow.float(), usual.float(), rtol=0.02, atol=0.02)
    model.train()
    with torch.autocast("cpu", dtype=torch.bfloat16), LowPrecisionWeights(model, torch.bfloat16).in_place():
        model(given)


def test_an_update_through_data_is_seen_at_the_next_step() -> None:
    """As by clipping of weights. It does not count as a new version of the tensor."""
    model = nn.Linear(2, 2)
    narrow = LowPrecisionWeights(model, torch.bfloat16)
    model.weight.data.fill_(3.0)
    with narrow.in_place():
        assert (model.weight == 3.0).all()


def test_a_copy_of_a_compiled_model_computes_with_its_own_weights() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    compile_regions(list(model), backend="eager")
    other = copy.deepcopy(model)
    with torch.no_grad():
        for weight in other.parameters():
            weight.zero_()
    assert not other(torch.randn(2, 4)).any()


def test_regions_rest_no_longer_after_an_error() -> None:
    regions = Regions()
    with pytest.raises(ValueError), regions.resting():
        raise ValueError
    assert not regions.paused


@pytest.mark.parametrize("targets", [[0, 1, -1], [0, 1, 5], [0, 1, 2, 3]], ids=["negative", "no such word", "too many"])
def test_wrong_targets_are_refused_as_by_pytorch(targets: list[int]) -> None:
    with pytest.raises((IndexError, ValueError, RuntimeError)):
        linear_cross_entropy(torch.randn(3, 4), torch.randn(5, 4), torch.tensor(targets))


def test_no_tokens_have_no_loss() -> None:
    assert not linear_cross_entropy(torch.randn(0, 4), torch.randn(5, 4), torch.zeros(0, dtype=torch.long))
