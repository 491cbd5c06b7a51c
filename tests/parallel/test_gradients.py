"""On whole tensors, clipping is PyTorch's own. Sharded ones are compared with these in tests/distributed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwise.parallel.gradients import clip, global_norm, gradients


def parameters_with_gradients(scale: float) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in [(3, 4), (5,), (), (2, 3, 4)]]
    for parameter in parameters:
        parameter.grad = scale * torch.randn(parameter.shape, generator=generator)
    return [*parameters, nn.Parameter(torch.zeros(7))]  # the last was not used in the step


@pytest.mark.parametrize("limit", [0.01, 1.0, 5.0, 1000.0])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_clipping_is_that_of_pytorch(scale: float, limit: float) -> None:
    mine, theirs = parameters_with_gradients(scale), parameters_with_gradients(scale)
    expected = torch.nn.utils.clip_grad_norm_(theirs, limit)
    grads = gradients(mine)
    norm = global_norm(grads)
    clip(grads, float(norm), limit)
    assert float(norm) == pytest.approx(float(expected), rel=1e-6)
    for parameter, other in zip(mine[:-1], theirs[:-1], strict=True):
        torch.testing.assert_close(parameter.grad, other.grad)
    assert mine[-1].grad is None


def test_the_norm_is_that_of_all_gradients_in_one_row() -> None:
    grads = gradients(parameters_with_gradients(2.0))
    flat = torch.cat([grad.flatten() for grad in grads])
    torch.testing.assert_close(global_norm(grads), flat.norm())


def test_a_gradient_within_the_limit_is_not_touched() -> None:
    grads = gradients(parameters_with_gradients(1.0))
    before = [grad.clone() for grad in grads]
    norm = float(global_norm(grads))
    clip(grads, norm, norm * 1.001)
    assert all(torch.equal(grad, old) for grad, old in zip(grads, before, strict=True))


def test_a_clipped_gradient_keeps_its_direction_and_has_the_norm_of_the_limit() -> None:
    grads = gradients(parameters_with_gradients(1.0))
    before = torch.cat([grad.flatten() for grad in grads])
    clip(grads, float(global_norm(grads)), 0.5)
    after = torch.cat([grad.flatten() for grad in grads])
    torch.testing.assert_close(after.norm(), torch.tensor(0.5))
    torch.testing.assert_close(after / after.norm(), before / before.norm())


def test_parameters_without_a_gradient_are_left_out() -> None:
    parameters = parameters_with_gradients(1.0)
    assert len(gradients(parameters)) == len(parameters) - 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_norm_of_half_precision_gradients_is_a_float(dtype: torch.dtype) -> None:
    norm = global_norm([torch.full((4,), 2.0, dtype=dtype)])
    assert norm.dtype == torch.float32
    assert float(norm) == 4.0


def test_a_gradient_that_is_no_number_shows_in_the_norm() -> None:
    for bad in (torch.inf, torch.nan):
        norm = global_norm([torch.ones(3), torch.tensor([1.0, bad])])
        assert not torch.isfinite(norm)
