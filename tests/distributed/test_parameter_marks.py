"""What build_model puts on parameters, attributes and hooks, is there on every rank under every strategy, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from shardwise import Loss, Session, Task
from shardwise.parallel import World
from shardwise.parallel.recipe import with_batch_norm
from tests.distributed.pool import RankPool
from tests.tasks import config_of

CALLED: list[str] = []
CONFIG = """
task: tests.distributed.test_parameter_marks:{task}
training: {{max_steps: 3, optimizer: {{name: sgd, lr: 0.1}}, {more}}}
"""
FSDP = [
    "strategy: fsdp",
    "fsdp: {activation_checkpointing: true, min_num_params: 1}",
    "fsdp: {sharding_strategy: NO_SHARD}",
    "fsdp: {cpu_offload: true}",
]
OTHERS = [
    "strategy: ddp",
    "strategy: zero1",
    "strategy: local_sgd",
    "strategy: tensor",
    "strategy: pipeline, gradient_accumulation: 2",
    "pipeline: {schedule: interleaved}, gradient_accumulation: 2",
]


class Plain(Task):
    narrow_weights = True

    def train_data(self) -> list[Tensor]:
        return list(torch.randn(24, 4, generator=torch.Generator().manual_seed(0)))

    def build_model(self) -> nn.Module:
        model = Chain()
        for number, block in enumerate(model.blocks):
            self.mark(block[0].weight, number)  # type: ignore[index]
        return model

    def mark(self, weight: nn.Parameter, number: int) -> None: ...

    def loss(self, model: nn.Module, batch: Tensor) -> Loss:
        return Loss((model(batch) - batch.flip(1)).square().sum(), len(batch))

    def tensor_plan(self, model: nn.Module, ranks: int, sequence_parallel: bool) -> dict[str, Any]:
        return {"blocks.*.0": ColwiseParallel(), "blocks.*.2": RowwiseParallel()}


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in range(4))

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


class Marked(Plain):
    """With an attribute that the first weight shares with nobody, and one that holds a tensor of its size."""

    def mark(self, weight: nn.Parameter, number: int) -> None:
        weight.lr_scale = 0.5 + number  # type: ignore[attr-defined]
        weight.importance = torch.ones_like(weight)  # type: ignore[attr-defined]


class Hooked(Plain):
    """Half of the gradient is masked by a tensor that was made with the model; then the whole of it is halved."""

    def mark(self, weight: nn.Parameter, number: int) -> None:
        mask = torch.ones_like(weight)
        mask[:4] = 0
        weight.register_hook(lambda grad: grad * mask)
        halve(weight, number)


class Halved(Plain):
    def mark(self, weight: nn.Parameter, number: int) -> None:
        halve(weight, number)


class HookedTensors(Plain):
    """Works for any kind of tensor, those that are split over ranks, too."""

    def mark(self, weight: nn.Parameter, number: int) -> None:
        weight.register_hook(lambda grad: grad * 0.25)
        halve(weight, number)


class Holding(Plain):
    """A hook that holds its parameter itself, which fsdp puts another in the place of."""

    def mark(self, weight: nn.Parameter, number: int) -> None:
        def hook(_: Tensor) -> None:
            assert weight.grad is not None
            weight.grad.mul_(0.5)

        weight.register_post_accumulate_grad_hook(hook)


def halve(weight: nn.Parameter, number: int) -> None:
    def hook(parameter: Tensor) -> None:
        CALLED.append(f"blocks.{number}")
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    weight.register_post_accumulate_grad_hook(hook)


def trained(task: str, more: str) -> dict[str, Any]:
    """Losses, the blocks whose hooks were called on this rank, and the attributes of its parameters."""
    CALLED.clear()
    text = CONFIG.format(task=task, more=more)
    with Session(config_of(text, [])) as session:
        session.prepare()
        losses = [session.loss(session.step(batch)) for batch in session.batches()]
        named = {
            name.replace("_checkpoint_wrapped_module.", ""): each
            for name, each in session.strategy.module.named_parameters()
        }
        return {
            "losses": losses,
            "called": sorted(set(CALLED)),
            "scales": {name: vars(each).get("lr_scale") for name, each in named.items()},
            "importance": [
                float(vars(each)["importance"].sum()) for each in named.values() if "importance" in vars(each)
            ],
            "narrow": session.strategy.low_precision is not None,
        }


@pytest.mark.parametrize("more", FSDP + OTHERS)
def test_attributes_of_parameters_are_there_on_every_rank(ranks: RankPool, more: str) -> None:
    expected = {f"blocks.{number}.0.weight": 0.5 + number for number in range(4)}
    for found in ranks.run(2, trained, "Marked", f"{more}, batch_size: 3"):
        assert found["scales"] == {name: expected.get(name) for name in found["scales"]}
        assert any(found["scales"].values()), "each rank has some of them"
        assert found["importance"] and set(found["importance"]) == {32.0}, "not a tensor without memory"


@pytest.mark.parametrize("more", ["strategy: ddp", "strategy: zero1", OTHERS[-1], OTHERS[-2]])
def test_hooks_change_the_gradient_as_in_one_process(ranks: RankPool, more: str) -> None:
    single = ranks.run(
        1, trained, "Hooked", f"strategy: single, batch_size: 6, gradient_accumulation: {accumulated(more)}"
    )[0]
    without = ranks.run(1, trained, "Plain", "strategy: single, batch_size: 6")[0]
    assert single["losses"] != pytest.approx(without["losses"], rel=1e-4)
    found = ranks.run(2, trained, "Hooked", f"{more}, batch_size: {6 if 'pipeline' in more else 3}")
    for each in found:
        assert each["losses"] == pytest.approx(single["losses"], rel=1e-5)
        assert each["called"]
    assert sorted({name for each in found for name in each["called"]}) == [f"blocks.{number}" for number in range(4)]


def accumulated(more: str) -> int:
    return 2 if "gradient_accumulation" in more else 1


@pytest.mark.parametrize(
    ("task", "more"), [*(("Halved", more) for more in FSDP), ("HookedTensors", "strategy: tensor")]
)
def test_hooks_are_called_with_the_part_of_a_sharded_parameter(ranks: RankPool, task: str, more: str) -> None:
    single = ranks.run(1, trained, task, "strategy: single, batch_size: 6")[0]
    batch_size = 6 if "tensor" in more else 3
    for each in ranks.run(2, trained, task, f"{more}, batch_size: {batch_size}"):
        assert each["losses"] == pytest.approx(single["losses"], rel=1e-5)
        assert each["called"] == [f"blocks.{number}" for number in range(4)]


@pytest.mark.parametrize("more", ["strategy: fsdp", "pipeline: {}, fsdp: {}, gradient_accumulation: 2"])
def test_hooks_on_a_gradient_that_no_rank_has_whole_are_refused_by_name(ranks: RankPool, more: str) -> None:
    with pytest.raises(
        Exception, match=r"register_hook, here of blocks.0.0.weight, blocks.1.0.weight.*Use ddp or zero1"
    ):
        ranks.run(2, trained, "Hooked", f"{more}, batch_size: 3")


def test_hooks_that_a_schedule_does_not_call_are_refused_by_name(ranks: RankPool) -> None:
    more = "pipeline: {schedule: zero_bubble}, gradient_accumulation: 2, batch_size: 3"
    with pytest.raises(Exception, match=r"zero_bubble does not call the hooks .* here on blocks.0.0.weight"):
        ranks.run(2, trained, "Halved", more)


def test_a_hook_that_holds_a_parameter_is_refused_where_another_takes_its_place(ranks: RankPool) -> None:
    expected = ranks.run(1, trained, "Holding", "strategy: single, batch_size: 6")[0]["losses"]
    for found in ranks.run(2, trained, "Holding", "strategy: ddp, batch_size: 3"):
        assert found["losses"] == pytest.approx(expected, rel=1e-5)
    with pytest.raises(Exception, match=r"cannot shard blocks.0.0.weight, which a mark of blocks.0.0.weight holds too"):
        ranks.run(2, trained, "Holding", "strategy: fsdp, batch_size: 3")


def test_a_handle_still_removes_its_hook(ranks: RankPool) -> None:
    assert all(not called for called in ranks.run(2, removed))


def removed() -> list[str]:
    CALLED.clear()
    config = config_of(CONFIG.format(task="Removing", more="strategy: ddp, batch_size: 3"), [])
    with Session(config) as session:
        session.prepare()
        for handle in Removing.handles:
            handle.remove()
        for batch in session.batches():
            session.step(batch)
    return CALLED


class Removing(Plain):
    handles: list[Any] = []

    def mark(self, weight: nn.Parameter, number: int) -> None:
        self.handles.append(weight.register_post_accumulate_grad_hook(lambda _: CALLED.append("called")))


def test_narrow_copies_are_not_computed_with_where_parameters_have_hooks(ranks: RankPool) -> None:
    for strategy in ("single", "ddp"):
        size = 1 if strategy == "single" else 2
        more = f"strategy: {strategy}, precision: bf16-mixed, batch_size: 3"
        assert ranks.run(size, trained, "Plain", more)[0]["narrow"]
        found = ranks.run(size, trained, "Halved", more)[0]
        assert not found["narrow"] and found["called"]


def test_modules_keep_their_hooks_and_attributes_when_batch_norm_is_made_one_of_all_ranks() -> None:
    seen = []

    def build() -> nn.Module:
        model: Any = nn.Sequential(nn.BatchNorm1d(3))
        model[0].register_forward_hook(lambda *_: seen.append("called"))
        model[0].kind = "mine"
        return model

    world = World(0, 2, torch.device("cuda"), 0, connected=False)
    model: Any = with_batch_norm(build, config_of("task: tests.tasks:Ragged\n").training, world)()
    assert isinstance(model[0], nn.SyncBatchNorm) and model[0].kind == "mine"
    model.eval()(torch.ones(2, 3))
    assert seen == ["called"]


def test_forward_hooks_are_called_on_every_rank(ranks: RankPool) -> None:
    for more in ("strategy: ddp", "strategy: fsdp"):
        assert all(called for called in ranks.run(2, forward_hooks_called, more))


class ForwardHooked(Plain):
    """With a hook that adds a tensor which was made with the model, and which no module registers."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        shift = torch.ones(4)

        def hook(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            CALLED.append("forward")
            return output + shift

        model.blocks[0].register_forward_hook(hook)  # type: ignore[union-attr, index]
        return model


def forward_hooks_called(more: str) -> list[str]:
    return list(dict(trained("ForwardHooked", f"{more}, batch_size: 3"))["called"])
