"""Parameters that a model holds in plain lists, or in several places: each is trained under its name, or refused by it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.kernels.low_precision_weights import LowPrecisionWeights
from shardwise.verify.own_gradients import OwnGradients
from tests.distributed import work
from tests.distributed.pool import RankPool
from tests.distributed.test_low_precision_gradients import norms_of_the_first_step
from tests.tasks import Ragged

HERE = "task: tests.distributed.test_held"


class HiddenParameter(Ragged):
    def build_model(self) -> nn.Module:
        model: Any = super().build_model()
        model.norm.more = {"scales": [nn.Parameter(torch.ones(16))]}
        return model


class HiddenModule(Ragged):
    def build_model(self) -> nn.Module:
        model: Any = super().build_model()
        model.norm.more = [nn.Linear(16, 16)]
        return model


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
@pytest.mark.parametrize("kind", [HiddenParameter, HiddenModule])
def test_a_parameter_that_nobody_would_train_is_refused_by_the_place_that_holds_it(
    ranks: RankPool, strategy: str, kind: type[Ragged]
) -> None:
    text = f"{HERE}:{kind.__name__}\n"
    size = 1 if strategy == "single" else 2
    with pytest.raises(AssertionError) as caught:
        ranks.run(size, work.train, text, [f"training.strategy={strategy}"])
    shape = "(16,)" if kind is HiddenParameter else "(16, 16)"
    said = f"ShardwiseError: the model holds a parameter of shape {shape} in norm.more, where PyTorch does not find it"
    assert str(caught.value).count(said) == size, "every rank says the same"
    assert "nn.ParameterList, nn.ModuleList" in str(caught.value) and "freeze it" in str(caught.value)


class TiedByData(Ragged):
    def build_model(self) -> nn.Module:
        model: Any = super().build_model()
        model.layers[1].inner[1].weight.data = model.layers[0].inner[1].weight.data
        return model


class Lazy(Ragged):
    def build_model(self) -> nn.Module:
        model: Any = super().build_model()
        model.head = nn.Sequential(nn.LazyLinear(16), model.head)
        return model


class OrderByRank(Ragged):
    def build_model(self) -> nn.Module:
        model: Any = super().build_model()
        names = ["age", "weight"] if dist.get_rank() == 0 else ["weight", "age"]
        model.heads = nn.ModuleDict({name: nn.Linear(16, 16) for name in names})
        return model


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    "kind, said",
    [
        (TiedByData, "layers.0.inner.1.weight and layers.1.inner.1.weight share their memory and are two parameters"),
        (Lazy, "the parameter head.0.weight has no shape yet"),
        (OrderByRank, "the ranks have not built the same model. On rank 1, number"),
    ],
)
def test_a_model_that_would_be_trained_as_another_is_refused_by_all_ranks(
    ranks: RankPool, strategy: str, kind: type[Ragged], said: str
) -> None:
    with pytest.raises(AssertionError) as caught:
        ranks.run(2, work.train, f"{HERE}:{kind.__name__}\n", [f"training.strategy={strategy}"])
    assert str(caught.value).count(said) == 2, "every rank says the same"


class SharedByFrozen(Ragged):
    def build_model(self) -> nn.Module:
        model: Any = super().build_model()
        for name in ("one", "other"):
            model.register_parameter(name, nn.Parameter(torch.zeros(4), requires_grad=False))
        model.other.data = model.one.data
        return model


def test_frozen_parameters_may_share_their_memory(ranks: RankPool) -> None:
    ranks.run(1, work.train, f"{HERE}:SharedByFrozen\n", ["training.strategy=single"])


class Frozen(HiddenModule):
    """As a teacher is kept out of a student's checkpoints."""

    def build_model(self) -> nn.Module:
        model: Any = super().build_model()
        teacher = model.norm.more[0].requires_grad_(False)
        with torch.no_grad():  # on the meta device too
            teacher.weight.fill_(0.25)
            teacher.bias.fill_(0.5)
        model.head.register_forward_pre_hook(lambda _, args: args[0] + teacher(args[0]).tanh())
        return model


class Listed(Ragged):
    """A registered parameter that the model reaches through a list."""

    def build_model(self) -> nn.Module:
        model: Any = super().build_model()
        model.uses = [model.layers[0].inner[1].weight]
        model.head.register_forward_pre_hook(lambda _, args: args[0] + args[0] @ model.uses[0].mean(0).diag())
        return model


class Doubling(nn.Module):
    """No linear layer, so that it has no narrow copy of the weight that it shares with one."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + hidden @ self.weight.mean(0).diag().to(hidden.dtype)


class Shared(Ragged):
    def build_model(self) -> nn.Module:
        model: Any = super().build_model()
        model.again = Doubling(model.layers[0].inner[1].weight)
        model.head.register_forward_pre_hook(lambda _, args: model.again(args[0]))
        return model


@pytest.mark.parametrize("kind", [Frozen, Listed, Shared])
def test_what_is_held_twice_or_frozen_aside_trains_on_two_ranks_as_on_one(ranks: RankPool, kind: type[Ragged]) -> None:
    text = f"{HERE}:{kind.__name__}\n"
    expected = ranks.run(1, work.train, text, ["training.strategy=single", "training.batch_size=12"])[0]
    result = ranks.run(2, work.train, text, ["training.strategy=ddp", "training.batch_size=6"])[0]
    assert result["losses"] == pytest.approx(expected["losses"], rel=1e-5)


def test_a_parameter_that_a_list_holds_too_is_refused_under_fsdp(ranks: RankPool) -> None:
    said = r"cannot shard layers\.0\.inner\.1\.weight, which uses holds too, outside of PyTorch's sight: use ddp"
    with pytest.raises(AssertionError, match=said):
        ranks.run(2, work.train, f"{HERE}:Listed\n", ["training.strategy=fsdp"])


@pytest.mark.parametrize("kind", [Listed, Shared])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_weight_used_with_and_without_a_narrow_copy_has_all_of_its_gradient_in_every_replica(
    ranks: RankPool, kind: type[Ragged], accumulation: int
) -> None:
    overrides = [f"task=tests.distributed.test_held:{kind.__name__}", f"training.total_batch_size={4 * accumulation}"]
    wide = ["training.strategy=single", "training.narrow_weights=false", "training.precision=32-true"]
    expected = ranks.run(1, norms_of_the_first_step, [*overrides, *wide])[0]
    for size, strategy in ((1, "single"), (2, "ddp")):
        for found in ranks.run(size, norms_of_the_first_step, [*overrides, f"training.strategy={strategy}"]):
            assert found == pytest.approx(expected, rel=0.1)


class HeadFirst(nn.Module):
    """Its tied weight is called after the head, which computes last."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 20, bias=False)
        self.words = nn.Embedding(20, 8)
        self.words.weight = self.head.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.words(ids))


@pytest.mark.parametrize("narrow", [False, True])
def test_the_gradient_of_a_tied_weight_is_heard_under_its_first_name(narrow: bool) -> None:
    model = HeadFirst()
    heard = OwnGradients(model)
    weights = LowPrecisionWeights(model, torch.bfloat16 if narrow else torch.float32)
    with weights.in_place():
        model(torch.arange(5)).float().sum().backward()
    assert list(heard.stop(1.0)) == ["head.weight"]
