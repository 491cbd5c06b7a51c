"""What only the ranks can find out is told as one sentence, with exit code 2: in train and in verify."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from shardwise import Loss, Session, ShardwiseError, Task
from shardwise.checkpoint.state import check_optimizer
from shardwise.engine.optimizer import build_optimizer
from tests.cli.program import shardwise
from tests.distributed.pool import RankPool
from tests.tasks import config_of

CONFIG = """
task: tests.distributed.test_refused_in_ranks:{task}
training: {{device: cpu, batch_size: 2, gradient_accumulation: 2, max_steps: 2, num_gpus: 2, optimizer: {{lr: 0.01}}, {more}}}
"""


class Uneven(Task):
    """Its matrices have five rows."""

    width = 5

    def train_data(self) -> list[Tensor]:
        return list(torch.randn(12, 4, generator=torch.Generator().manual_seed(0)))

    def build_model(self) -> nn.Module:
        return Chain(self.width)

    def loss(self, model: nn.Module, batch: Tensor) -> Loss:
        return Loss(model(batch).square().sum(), len(batch))

    def tensor_plan(self, model: nn.Module, ranks: int, sequence_parallel: bool) -> dict[str, Any]:
        return {"blocks.*.0": ColwiseParallel(), "blocks.*.2": RowwiseParallel()}


class Unsplittable(Uneven):
    """Its plan cuts what cannot be cut."""

    def tensor_plan(self, model: nn.Module, ranks: int, sequence_parallel: bool) -> dict[str, Any]:
        return {"blocks.*.1": ColwiseParallel()}


class Joined(Uneven):
    """What a block gets is not what the block before gave: a pipeline cannot cut there."""

    def build_model(self) -> nn.Module:
        return Chain(4, joined=True)


class Chain(nn.Module):
    def __init__(self, width: int, joined: bool = False) -> None:
        super().__init__()
        self.joined = joined
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, width), nn.LayerNorm(width), nn.Linear(width, 4)) for _ in range(3)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden) + (hidden.mean() if self.joined else 0)
        return hidden


REFUSED = [
    ("Uneven", "strategy: tensor", "blocks.0.0.weight of shape [5, 4] does not divide over 2 ranks along its axis 0"),
    ("Unsplittable", "strategy: tensor", "the task's tensor_plan cannot be applied to its model"),
    ("Joined", "strategy: pipeline", "strategy pipeline cannot cut this model"),
]


@pytest.mark.parametrize(("task", "more", "told"), REFUSED)
def test_a_model_that_a_strategy_cannot_split_is_told_once_with_exit_code_2(
    task: str, more: str, told: str, tmp_path: Path
) -> None:
    (tmp_path / "odd.yaml").write_text(CONFIG.format(task=task, more=more))
    for command in (["train", "odd.yaml"], ["verify", "odd.yaml", "--ranks", "2"]):
        done = shardwise(tmp_path, *command)
        assert done.returncode == 2, done.stdout + done.stderr
        assert done.stderr.count("error:") == 1 and done.stderr.count(told) == 1, done.stderr
        assert "Traceback" not in done.stderr and "restart" not in done.stderr


# ---------------------------------------------------------------- optimizers that hold other parameters


def test_an_optimizer_that_drops_a_parameter_is_refused_when_it_is_made() -> None:
    def make(kind: Any, groups: list[dict[str, Any]], settings: dict[str, Any]) -> torch.optim.Optimizer:
        groups[0]["params"].pop()
        return kind(groups, **settings)

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(ShardwiseError, match=r"the optimizer lacks 1 parameter\(s\) of the model: 1.weight"):
        build_optimizer(model, config_of("task: tests.tasks:Ragged\n").training.optimizer, 0.1, make=make)


def test_parameters_that_one_of_model_and_optimizer_does_not_have_are_named() -> None:
    model = nn.Linear(2, 2)
    check_optimizer(model, torch.optim.SGD(model.parameters()))
    model.bias.requires_grad_(False)
    check_optimizer(model, torch.optim.SGD([model.weight]))
    check_optimizer(model, torch.optim.SGD(model.parameters()))
    with pytest.raises(
        ShardwiseError, match=r"lacks 1 parameter\(s\) of the model: weight. They would be neither trained"
    ):
        check_optimizer(model, torch.optim.SGD([model.bias]))
    with pytest.raises(ShardwiseError, match=r"1 parameter\(s\) that the model does not have, of shape \[3\]"):
        check_optimizer(model, torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(3))]))


@pytest.mark.parametrize("strategy", ["single", "fsdp"])
@pytest.mark.parametrize("change", ["missing", "foreign"])
def test_a_checkpoint_with_such_an_optimizer_is_no_key_error(
    ranks: RankPool, strategy: str, change: str, tmp_path: Path
) -> None:
    expected = "the optimizer lacks 1 parameter(s)" if change == "missing" else "of shape [2]"
    for told in ranks.run(1 if strategy == "single" else 2, saved, strategy, change, str(tmp_path)):
        assert expected in told


def saved(strategy: str, change: str, folder: str) -> str:
    """What a checkpoint is refused with, of an optimizer that was changed after it was made."""
    text = CONFIG.format(task="Uneven", more=f"strategy: {strategy}").replace("num_gpus: 2, ", "")
    session = Session(config_of(text + f"run_dir: {folder}\n", []))
    session.prepare()
    optimizer = session.parts.optimizer
    if change == "missing":
        optimizer.param_groups[0]["params"].pop()
    else:
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "weight_decay": 0.0})
    with pytest.raises(ShardwiseError) as told:
        session.save()
    session.world.leave()
    return str(told.value)


# ---------------------------------------------------------------- dp without two GPUs


def test_dp_on_cpus_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "dp.yaml").write_text(CONFIG.format(task="Uneven", more="strategy: dp").replace("num_gpus: 2, ", ""))
    done = shardwise(tmp_path, "train", "dp.yaml")
    assert done.returncode == 0, done.stderr
    assert "dp: it is for two or more GPUs of one machine, and here it drives no GPU" in done.stdout
    assert "Use strategy: single; or ddp" in done.stdout
    done = shardwise(tmp_path, "train", "dp.yaml", "--set", "training.num_gpus=2")
    assert done.returncode == 2
    assert "dp is one process, but 2 ranks were started; ddp is for several. dp drives all GPUs" in done.stderr
