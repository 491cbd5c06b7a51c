"""The loss without the logits is the loss with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwise.kernels.cross_entropy import fused_loss_and_gradient, linear_cross_entropy, loss_and_gradient
from tests.distributed.pool import RankPool

TOKENS, WORDS, WIDTH = 37, 50, 16


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, TOKENS, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(WORDS, WIDTH, generator=generator).to(dtype).requires_grad_()
    bias = torch.randn(WORDS, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, WORDS, (3, TOKENS), generator=generator)
    targets[0, :5] = -100
    return hidden, weight, bias, targets


@pytest.mark.parametrize("chunk", [1, 10, 37, 1000])
@pytest.mark.parametrize("with_bias", [True, False])
def test_loss_and_gradients_are_those_of_whole_logits(chunk: int, with_bias: bool) -> None:
    hidden, weight, bias, targets = inputs()
    learned = (hidden, weight, bias) if with_bias else (hidden, weight)
    loss = linear_cross_entropy(hidden, weight, targets, bias if with_bias else None, chunk=chunk)
    found = torch.autograd.grad(loss / 7, learned)
    logits = F.linear(hidden, weight, bias if with_bias else None)
    whole = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    torch.testing.assert_close(loss, whole)
    for one, other in zip(found, torch.autograd.grad(whole / 7, learned), strict=True):
        torch.testing.assert_close(one, other)


def test_in_bf16_it_is_as_near_to_the_truth_as_whole_logits_are() -> None:
    hidden, weight, _, targets = inputs(torch.bfloat16)
    truth_of = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    truth = F.cross_entropy(F.linear(*truth_of).flatten(0, 1), targets.flatten(), reduction="sum")
    exact = torch.autograd.grad(truth, truth_of)
    whole = F.cross_entropy(F.linear(hidden, weight).float().flatten(0, 1), targets.flatten(), reduction="sum")
    usual = torch.autograd.grad(whole, (hidden, weight))
    found = torch.autograd.grad(linear_cross_entropy(hidden, weight, targets, chunk=10), (hidden, weight))
    for one, other, right in zip(found, usual, exact, strict=True):
        assert (one - right).norm() < 1.5 * (other - right).norm()


def test_under_autocast_masters_get_gradients_of_their_own_type() -> None:
    hidden, weight, _, targets = inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, targets)
    loss.backward()
    assert loss.dtype == torch.float32
    assert weight.grad is not None and weight.grad.dtype == torch.float32


def test_the_kernel_to_be_compiled_computes_the_same() -> None:
    hidden, weight, _, targets = inputs()
    logits = F.linear(hidden, weight).flatten(0, 1).detach()
    for one, other in zip(
        fused_loss_and_gradient(logits, targets.flatten(), -100),
        loss_and_gradient(logits, targets.flatten(), -100),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_no_more_logits_than_a_chunk_exist_at_a_time() -> None:
    hidden, weight, _, targets = inputs()
    with _Largest() as seen:
        linear_cross_entropy(hidden, weight, targets, chunk=10).backward()
    assert 0 < seen.tokens_by_words <= 10 * WORDS


class _Largest(TorchDispatchMode):
    tokens_by_words = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.ndim == 2 and leaf.shape[1] == WORDS and len(leaf) != WIDTH:
                self.tokens_by_words = max(self.tokens_by_words, leaf.numel())
        return result


def test_where_nothing_is_to_be_learned_only_the_loss_is_computed() -> None:
    hidden, weight, _, targets = inputs()
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, targets, chunk=10)
    torch.testing.assert_close(loss, linear_cross_entropy(hidden, weight, targets).detach())
    assert not loss.requires_grad


def test_ranks_that_have_a_part_of_the_words_each_compute_the_same(ranks: RankPool) -> None:
    hidden, weight, _, targets = inputs()
    whole = linear_cross_entropy(hidden, weight, targets)
    to_hidden, to_weight = torch.autograd.grad(whole, (hidden, weight))
    for rank, (loss, of_hidden, of_part) in enumerate(ranks.run(2, _with_a_part_of_the_words)):
        torch.testing.assert_close(loss, whole.detach())
        torch.testing.assert_close(of_hidden, to_hidden)
        torch.testing.assert_close(of_part, to_weight[rank * WORDS // 2 : (rank + 1) * WORDS // 2])


def _with_a_part_of_the_words() -> tuple[Tensor, Tensor, Tensor]:
    from shardwise.parallel import World

    world = World.join("cpu")
    try:
        hidden, weight, _, targets = inputs()
        part = weight.detach()[world.rank * WORDS // 2 : (world.rank + 1) * WORDS // 2].requires_grad_()
        loss = linear_cross_entropy(hidden, part, targets, chunk=10, group=dist.group.WORLD)
        to_hidden, to_part = torch.autograd.grad(loss, (hidden, part))
        return loss.detach(), to_hidden, to_part
    finally:
        world.leave()
