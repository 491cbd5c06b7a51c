"""Blocks compiled on their own. The wiring: with PyTorch's `eager` backend, which compiles nothing."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.kernels.regions import compile_regions


@pytest.fixture(autouse=True)
def _nothing_compiled_yet() -> None:
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + self.inner(rows).relu()


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(3)))


def test_names_and_numbers_stay_as_they_are() -> None:
    plain, compiled = model(), model()
    regions = compile_regions(list(compiled), backend="eager")
    rows = torch.randn(5, 4)
    plain(rows).sum().backward()
    compiled(rows).sum().backward()
    assert list(plain.state_dict()) == list(compiled.state_dict())
    for (name, one), (_, other) in zip(plain.named_parameters(), compiled.named_parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), name  # type: ignore[arg-type]
    assert regions.problem is None and regions.seconds > 0


def test_evaluation_is_not_compiled() -> None:
    compiled = model()
    regions = compile_regions(list(compiled), backend="eager")
    with torch.no_grad():
        compiled(torch.randn(5, 4))
    assert regions.seconds == 0


def test_what_is_only_tried_out_is_not_compiled() -> None:
    compiled = model()
    regions = compile_regions(list(compiled), backend="eager")
    with regions.resting():
        compiled(torch.randn(5, 4))
    assert regions.seconds == 0
    compiled(torch.randn(5, 4))
    assert regions.seconds > 0


def test_a_model_that_does_not_compile_runs_as_it_is_and_one_line_says_so(caplog: pytest.LogCaptureFixture) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no such instruction")

    plain, compiled = model(), model()
    regions = compile_regions(list(compiled), backend=broken)  # type: ignore[arg-type]  # torch takes functions, too
    rows = torch.randn(5, 4)
    with caplog.at_level(logging.WARNING, logger="shardwise"):
        assert torch.equal(compiled(rows), plain(rows))
    assert regions.problem is not None and "no such instruction" in regions.problem
    (line,) = [record.message for record in caplog.records if record.name == "shardwise.kernels.regions"]
    assert line.startswith("the model does not compile, and runs as it is: ") and "\n" not in line
    assert all("forward" not in vars(block) for block in compiled)


class Pooled(nn.Module):
    """Two blocks of one code and different sizes, as the stages of a network are."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = Block(), Block()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.narrow(self.wide(rows)[::2])


def compiled_sizes(one_size: bool, rows: list[int]) -> list[int | str]:
    """How many rows each graph that is compiled takes."""
    found: list[int | str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        (rows,) = [each for each in inputs if isinstance(each, torch.Tensor) and not isinstance(each, nn.Parameter)]
        found.append("any" if any(isinstance(each, torch.SymInt) for each in inputs) else rows.shape[0])
        return graph.forward

    network = Pooled()
    compile_regions([network.wide, network.narrow], backend=backend, one_size=one_size)  # type: ignore[arg-type]
    for number in rows:
        network(torch.randn(number, 4)).sum().backward()
    return found


def test_stages_of_one_size_are_each_compiled_for_it() -> None:
    assert compiled_sizes(False, [24, 24]) == [24, "any"]
    torch._dynamo.reset()
    assert compiled_sizes(True, [24, 24]) == [24, 12]


def test_a_shorter_last_batch_is_not_compiled_for_and_a_first_one_does_not_stay_the_measure() -> None:
    assert compiled_sizes(True, [24, 10, 24, 2]) == [24, 12]
    torch._dynamo.reset()
    assert compiled_sizes(True, [10, 24, 10, 24]) == [10, 5, 24, 12]
