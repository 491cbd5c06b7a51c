"""Large tensors are filled with random numbers by all cores, and the numbers follow from the seed alone."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from shardwise.engine import parallel_init
from shardwise.engine.parallel_init import ParallelInit


@pytest.fixture(autouse=True)
def everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_init, "LARGE", 2**12)
    monkeypatch.setattr(parallel_init, "PIECE", 2**10)


def drawn(build: Callable[[], Tensor], threads: int = 2) -> Tensor:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    torch.manual_seed(3)
    try:
        with ParallelInit():
            return build()
    finally:
        torch.set_num_threads(before)


def layer() -> Tensor:
    return nn.Linear(100, 200).weight.detach()


def llama() -> Tensor:
    model = LlamaForCausalLM(
        LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, vocab_size=128)
    )
    return torch.cat([weight.detach().view(-1) for weight in model.parameters() if weight.dim() == 2])


@pytest.mark.parametrize("build", [layer, llama], ids=["a layer of PyTorch", "a model of Transformers"])
def test_several_threads_draw_whatever_builds_the_model(
    build: Callable[[], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    drew: dict[str, int] = {}

    def noted(fill: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def draw(piece: Tensor, *args: float, **given: torch.Generator) -> Tensor:
            name = threading.current_thread().name
            drew[name] = drew.get(name, 0) + piece.numel()
            return fill(piece, *args, **given)

        return draw

    monkeypatch.setattr(
        parallel_init, "_FILLS", {operation: noted(fill) for operation, fill in parallel_init._FILLS.items()}
    )
    size = drawn(build).numel()
    assert sum(drew.values()) >= size
    assert all(name.startswith("weights") for name in drew)


def test_the_number_of_threads_changes_nothing() -> None:
    assert torch.equal(drawn(layer, threads=1), drawn(layer, threads=3))


def test_the_numbers_are_those_that_were_asked_for() -> None:
    normal = drawn(lambda: torch.empty(2**18).normal_(2.0, 0.5))
    assert float(normal.mean()) == pytest.approx(2.0, abs=0.005)
    assert float(normal.std()) == pytest.approx(0.5, abs=0.005)
    uniform = drawn(lambda: torch.empty(2**18).uniform_(-1.0, 3.0))
    assert -1 <= float(uniform.min()) < -0.99
    assert 2.99 < float(uniform.max()) < 3
    assert float(uniform.mean()) == pytest.approx(1.0, abs=0.02)


def test_no_two_pieces_and_no_two_tensors_are_alike() -> None:
    def two() -> Tensor:
        return torch.cat([torch.empty(2**13).normal_(), torch.empty(2**13).normal_()])

    pieces = drawn(two).split(2**10)
    assert len({tuple(piece[:4].tolist()) for piece in pieces}) == len(pieces) == 16


def test_another_seed_gives_other_numbers() -> None:
    torch.manual_seed(4)
    with ParallelInit():
        other = layer()
    assert not torch.equal(drawn(layer), other)


def test_small_tensors_given_generators_and_parts_of_tensors_are_left_to_pytorch() -> None:
    def small() -> Tensor:
        return nn.Linear(8, 8).weight.detach()

    def own_generator() -> Tensor:
        return torch.empty(2**13).normal_(generator=torch.Generator().manual_seed(1))

    def part() -> Tensor:
        whole = torch.zeros(200, 100)
        whole[:, :50].normal_()
        return whole

    for build in (small, own_generator, part):
        torch.manual_seed(3)
        plain = build()
        assert torch.equal(drawn(build), plain)


def test_parameters_that_need_gradients_can_be_drawn_and_learn() -> None:
    def build() -> Tensor:
        weight = nn.Parameter(torch.empty(100, 200))
        nn.init.trunc_normal_(weight, std=0.02)
        return weight

    weight = drawn(build)
    assert weight.requires_grad
    assert weight.is_leaf
    assert float(weight.detach().std()) == pytest.approx(0.02, rel=0.05)
    weight.sum().backward()
    assert weight.grad is not None
