"""Experts that get no token: on one rank, in one micro-batch, or on all ranks. The numbers are those of one process."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise import Loss, Session, Task
from shardwise.parallel import unused_parameters
from shardwise.parallel.strategies.fsdp import sharding_units
from tests.cli.program import shardwise
from tests.distributed import work
from tests.distributed.pool import RankPool
from tests.tasks import config_of

CONFIG = """
task: tests.distributed.test_unused_parameters:{task}
training: {{max_epochs: 2, optimizer: {{name: adamw, lr: 0.05, weight_decay: 0.1}}, {more}}}
"""
WAYS = [
    "fsdp: {}",
    "fsdp: {min_num_params: 1}",
    "fsdp: {min_num_params: 1, activation_checkpointing: true}",
    "fsdp: {min_num_params: 1, sharding_strategy: SHARD_GRAD_OP}",
    "fsdp: {min_num_params: 1, sharding_strategy: NO_SHARD}",
    "ddp: {find_unused_parameters: true}",
]


class TopOne(Task):
    """Each sample goes to one of four experts; of a step's four samples most experts get none."""

    kept = "experts"

    def train_data(self) -> list[Tensor]:
        return list(torch.randn(22, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64))

    def build_model(self) -> nn.Module:
        return Layers(self.kept).double()

    def loss(self, model: nn.Module, batch: Tensor) -> Loss:
        return Loss((model(batch) - 1).square().sum(), len(batch))


class ByExpert(TopOne):
    """Its blocks are the experts."""

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return [expert for layer in model.layers for expert in layer.experts]  # type: ignore[union-attr]


class ByBoth(ByExpert):
    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return [*model.layers, *super().blocks(model)]  # type: ignore[misc]


class Unnamed(TopOne):
    """Of experts that do not say so."""

    kept = "parts"

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return [part for layer in model.layers for part in layer.parts]  # type: ignore[union-attr]


class Tied(TopOne):
    """Its first and last matrix are one parameter, which the outermost unit holds."""

    def build_model(self) -> nn.Module:
        model = Layers(self.kept)
        first, last = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        last.weight = first.weight
        model.layers[0].router = nn.Sequential(first, nn.Tanh())
        model.layers[2].router = nn.Sequential(nn.Tanh(), last)
        return model.double()


class Layers(nn.Module):
    def __init__(self, kept: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(kept) for _ in range(3))

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class Layer(nn.Module):
    def __init__(self, kept: str) -> None:
        super().__init__()
        self.router = nn.Linear(4, 4)
        self.kept = kept
        setattr(self, kept, nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)) for _ in range(4)))

    def forward(self, hidden: Tensor) -> Tensor:
        weights, chosen = self.router(hidden).softmax(-1).max(-1)
        out = hidden.clone()
        for number, expert in enumerate(getattr(self, self.kept)):
            mine = (chosen == number).nonzero().squeeze(-1)
            if len(mine):
                out = out.index_add(0, mine, expert(hidden[mine]) * weights[mine, None])
        return out


def trained(task: str, more: str) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights."""
    if os.environ.get("NO_ZEROS"):
        unused_parameters.reduce_unused = lambda model: False  # type: ignore[attr-defined]
    try:
        with Session(config_of(CONFIG.format(task=task, more=more), [])) as session:
            session.prepare()
            losses = [session.loss(session.step(batch)) for batch in session.batches()]
            return losses, work.full_weights(session)
    finally:
        from shardwise.compat.distributed import reduce_unused

        unused_parameters.reduce_unused = reduce_unused  # type: ignore[attr-defined]


def of_an_older_torch(task: str, more: str) -> Any:
    """One whose fully_shard cannot bring zeros by itself."""
    os.environ["NO_ZEROS"] = "1"
    try:
        return trained(task, more)
    finally:
        del os.environ["NO_ZEROS"]


def assert_same(found: Any, expected: Any) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    for name, weight in expected[1].items():
        torch.testing.assert_close(
            found[1][name.replace("_checkpoint_wrapped_module.", "")], weight, rtol=1e-9, atol=1e-9
        )


@pytest.mark.parametrize("job", [trained, of_an_older_torch])
@pytest.mark.parametrize("more", WAYS)
def test_experts_without_a_token_train_as_in_one_process(ranks: RankPool, more: str, job: Any) -> None:
    """With Adam and weight decay, which would move an expert that got zeros where it has no gradient."""
    for accumulation in (1, 2):
        expected = ranks.run(1, trained, "TopOne", "strategy: single, batch_size: 4")[0]
        options = f"{more}, batch_size: {2 // accumulation}, gradient_accumulation: {accumulation}"
        for found in ranks.run(2, job, "TopOne", options):
            assert_same(found, expected)


@pytest.mark.parametrize("task", ["ByExpert", "ByBoth", "Tied"])
@pytest.mark.parametrize("more", WAYS[1:3])
def test_blocks_may_be_the_experts_themselves_and_weights_may_be_tied(ranks: RankPool, task: str, more: str) -> None:
    expected = ranks.run(1, trained, task, "strategy: single, batch_size: 4")[0]
    for found in ranks.run(2, trained, task, f"{more}, batch_size: 2"):
        assert_same(found, expected)


def test_units_that_a_rank_does_not_call_are_told_by_name(tmp_path: Path) -> None:
    text = CONFIG.format(task="Unnamed", more=f"{WAYS[1]}, batch_size: 2, num_gpus: 2")
    (tmp_path / "experts.yaml").write_text(text)
    done = shardwise(tmp_path, "train", "experts.yaml")
    assert done.returncode == 2
    assert done.stderr.count("error:") == 1 and "Traceback" not in done.stderr, done.stderr
    assert re.search(r"shards each of layers.\d.parts.0 to layers.\d.parts.3 on its own, and this rank", done.stderr)


def test_experts_are_sharded_with_the_layer_that_holds_them() -> None:
    model = Layers("experts")
    layers = list(model.layers)
    experts = [expert for layer in layers for expert in layer.experts]  # type: ignore[union-attr]
    assert sharding_units(model, experts, 1) == layers
    assert sharding_units(model, [*layers, *experts], 1) == layers
    other = Layers("parts")
    parts = [part for layer in other.layers for part in layer.parts]  # type: ignore[union-attr]
    assert sharding_units(other, [*other.layers, *parts], 1) == [*parts, *other.layers], "what is within comes first"


def test_the_default_blocks_are_the_outermost_ones() -> None:
    task = TopOne(config_of("task: tests.distributed.test_unused_parameters:TopOne\n"))
    model = Layers("experts")
    assert task.blocks(model) == list(model.layers), "not the four experts of the first layer"
    nested: Any = nn.ModuleList([nn.ModuleList([nn.Linear(2, 2) for _ in range(3)]), nn.ModuleList([nn.Linear(2, 2)])])
    assert task.blocks(nn.Sequential(nested)) == list(nested[0]), "a list has no forward pass of its own"
