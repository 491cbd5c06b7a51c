"""How a model gets onto the ranks: made once, the same everywhere, tied weights tied, no rank holding all of it."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.engine.session import Session
from shardwise.parallel.strategies.fsdp import sharding_units
from shardwise.parallel.weights import materialize
from tests.distributed import work
from tests.distributed.pool import RankPool
from tests.tasks import Ragged, Toy, config_of

CONFIG = "task: tests.tasks:Ragged\n"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_weights_are_made_once_and_are_those_of_a_single_process(ranks: RankPool, strategy: str) -> None:
    single = ranks.run(1, functools.partial(_built, "single"))[0]
    results = ranks.run(2, functools.partial(_built, strategy))
    for name, weight in single["weights"].items():
        for result in results:
            assert torch.equal(result["weights"][name], weight), name
            assert torch.equal(result["slope"], single["slope"]), "buffers outside the state dict travel too"
    assert [result["real_builds"] for result in results] == [1, 0]


def _built(strategy: str) -> dict[str, Any]:
    """Weights after prepare(), and how often the model was built for real on this rank."""
    real = 0
    original = Ragged.build_model

    def counting(self: Ragged) -> nn.Module:
        nonlocal real
        model = original(self)
        real += not next(model.parameters()).is_meta
        return model

    Ragged.build_model = counting  # type: ignore[method-assign]
    try:
        return work.with_session(CONFIG, [f"training.strategy={strategy}"], _look) | {"real_builds": real}
    finally:
        Ragged.build_model = original  # type: ignore[method-assign]


def _look(session: Any) -> dict[str, Any]:
    return {
        "weights": work.full_weights(session),
        "slope": dict(session.parts.strategy.module.named_buffers())["slope"],
    }


class Turned(Ragged):
    """Its head lies in memory column by column, as what a QR decomposition gives."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        head = next(each for each in model.modules() if isinstance(each, nn.Linear))
        head.weight = nn.Parameter(head.weight.detach().t().contiguous().t())
        assert not head.weight.is_contiguous()
        return model


def test_weights_that_lie_otherwise_in_memory_are_sharded_too(ranks: RankPool) -> None:
    config = CONFIG.replace("tests.tasks:Ragged", f"{__name__}:Turned")
    trained = [
        ranks.run(2, work.with_session, config, [f"training.strategy={strategy}"], _after_two_steps)[0]
        for strategy in ("ddp", "fsdp")
    ]
    for name, weight in trained[0].items():
        assert torch.allclose(trained[1][name], weight, atol=1e-6), name


def _after_two_steps(session: Any) -> dict[str, torch.Tensor]:
    for _, batch in zip(range(2), session.batches(), strict=False):
        session.step(batch)
    weights: dict[str, torch.Tensor] = work.full_weights(session)
    return weights


def test_under_fsdp_each_rank_holds_its_share_of_parameters_gradients_and_optimizer_state(ranks: RankPool) -> None:
    wide = ["training.strategy=fsdp", "model.width=64", "training.batch_size=2"]
    whole = sum(parameter.numel() for parameter in Toy(29, 64, 3, tied=True).parameters())
    for held in ranks.run(4, work.with_session, CONFIG, wide, _held):
        for kind, number in held.items():
            assert number == pytest.approx(whole / 4, rel=0.05), kind


def _held(session: Any) -> dict[str, float]:
    session.step(next(iter(session.batches())))
    parameters = session.parts.parameters
    assert all(isinstance(parameter, DTensor) for parameter in parameters)
    states = [session.parts.optimizer.state[parameter] for parameter in parameters]
    return {
        "parameters": sum(parameter.to_local().numel() for parameter in parameters),
        "first moments": sum(state["exp_avg"].to_local().numel() for state in states),
        "second moments": sum(state["exp_avg_sq"].to_local().numel() for state in states),
    }


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_tied_weights_stay_tied(ranks: RankPool, strategy: str) -> None:
    assert (
        ranks.run(2, work.with_session, CONFIG, [f"training.strategy={strategy}", "training.batch_size=6"], _tied)
        == [True] * 2
    )


def _tied(session: Any) -> bool:
    session.step(next(iter(session.batches())))
    weights = work.full_weights(session)
    return torch.equal(weights["head.weight"], weights["embedding.weight"])


def test_units_honour_min_num_params_and_leave_shared_weights_outside() -> None:
    model = Toy(29, 16, 3, tied=True)
    blocks: list[Any] = list(model.layers)
    size = sum(parameter.numel() for parameter in blocks[0].parameters())
    assert sharding_units(model, blocks, size) == blocks
    assert sharding_units(model, blocks, size + 1) == []
    blocks[1].inner[1].weight = blocks[0].inner[1].weight  # a weight that two blocks share can be a unit of neither
    assert sharding_units(model, blocks, 0) == blocks[2:]


def test_materialize_keeps_ties_and_leaves_nothing_on_meta() -> None:
    with torch.device("meta"):
        model = Toy(29, 16, 3, tied=True)
    materialize(model, torch.device("cpu"))
    assert model.head.weight is model.embedding.weight
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])


def test_a_parameter_that_is_moved_stays_itself_for_those_who_hold_it_in_a_list() -> None:
    model: Any = nn.LSTM(3, 4)
    materialize(model, torch.device("cpu", 0))  # to PyTorch another device than "cpu", so that everything is moved
    assert model._flat_weights[0] is model.weight_ih_l0


class _OneBuffer(Ragged):
    """The same buffer in every block, as frozen random matrices of adapters are, or a mask."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        scale = 1 + torch.rand(self.config.model.width)
        for inner in [layer.inner for layer in model.layers]:  # type: ignore[union-attr]
            inner.register_buffer("scale", scale)
            inner.register_forward_hook(lambda inner, given, result: result * inner.scale)
        return model


@pytest.mark.parametrize("way", ["strategy=ddp", "fsdp={}", "fsdp={activation_checkpointing: true}", "pipeline={}"])
def test_a_buffer_that_modules_share_is_one_on_every_rank(ranks: RankPool, way: str) -> None:
    text = f"task: {__name__}:_OneBuffer\ntraining: {{batch_size: 6, max_steps: 4}}\n"
    single = ranks.run(1, work.train, text, ["training.batch_size=12"])[0]
    several = ["training.gradient_accumulation=2"] if way.startswith("pipeline") else []
    for rank in ranks.run(2, work.train, text, [f"training.{way}", *several]):
        assert rank["losses"] == pytest.approx(single["losses"], rel=1e-5)


class _CannotBeMeta(Ragged):
    """A model whose constructor looks at numbers, which the meta device does not have."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        assert float(model.embedding.weight.sum()) != 0  # type: ignore[operator, union-attr]
        return model


class _LooseTensor(Ragged):
    """A model with a tensor that is neither parameter nor buffer: nobody could fill it in later."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.loose = torch.ones(3)
        return model


class _LooseList(Ragged):
    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.loose = {"a": [torch.ones(3)]}  # type: ignore[assignment]
        return model


class _Numpy(Ragged):
    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.embedding.weight.detach().numpy()  # type: ignore[operator, union-attr]
        return model


@pytest.mark.parametrize("kind", ["_CannotBeMeta", "_LooseTensor", "_LooseList", "_Numpy"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_model_that_cannot_be_built_without_weights_is_built_with_them(
    ranks: RankPool, kind: str, strategy: str
) -> None:
    text = f"task: tests.distributed.test_parallelize:{kind}\n"
    expected = ranks.run(1, work.train, CONFIG, ["training.strategy=single", "training.batch_size=12"])[0]
    result = ranks.run(2, work.train, text, [f"training.strategy={strategy}", "training.batch_size=6"])[0]
    assert result["losses"] == pytest.approx(expected["losses"], rel=1e-5)


class _OneBlockThrice(Ragged):
    def build_model(self) -> nn.Module:
        model: Any = super().build_model()
        model.layers = nn.ModuleList([model.layers[0]] * 3)
        return model


def test_one_block_used_again_works_under_ddp_and_is_refused_under_fsdp(ranks: RankPool) -> None:
    text = "task: tests.distributed.test_parallelize:_OneBlockThrice\n"
    expected = ranks.run(1, work.train, text, ["training.strategy=single", "training.batch_size=12"])[0]
    result = ranks.run(2, work.train, text, ["training.strategy=ddp", "training.batch_size=6"])[0]
    assert result["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    with pytest.raises(AssertionError, match=r"cannot shard layers.1, which is layers.0 used again: use ddp"):
        ranks.run(2, work.train, text, ["training.strategy=fsdp", "training.batch_size=6"])


class _Scalar(Ragged):
    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.temperature = nn.Parameter(torch.tensor(1.0))
        return model


def test_a_scalar_parameter_is_named_under_fsdp(ranks: RankPool) -> None:
    with pytest.raises(AssertionError, match="fsdp cannot shard the scalar parameter temperature: give it the shape"):
        ranks.run(2, work.train, "task: tests.distributed.test_parallelize:_Scalar\n", ["training.strategy=fsdp"])


def test_a_users_own_model_starts_from_rank_zeros_weights_whatever_the_seeds(ranks: RankPool) -> None:
    for strategy in ("ddp", "fsdp"):
        first, second = ranks.run(2, functools.partial(_own_loop, strategy))
        assert first["start"] == second["start"]
        assert first["losses"] == second["losses"]
        assert first["losses"][-1] < first["losses"][0]


def _own_loop(strategy: str) -> dict[str, Any]:
    import os

    from shardwise import Loss, Session

    torch.manual_seed(
        int(os.environ["RANK"])
    )  # the mistake of the tutorials: a seed per rank before building the model
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    generator = torch.Generator().manual_seed(0)
    points = [(x, x.prod(dim=0, keepdim=True)) for x in torch.rand(50, 2, generator=generator)]

    def loss(model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        return Loss((model(x) - y).square().sum(), len(x))

    overrides = [f"training.strategy={strategy}", "training.max_epochs=5", "training.optimizer.lr=0.05"]
    with Session(config_of("task: own", overrides)) as session:
        session.prepare(model=model, data=points, loss=loss)
        start = {name: value.tolist() for name, value in work.full_weights(session).items()}
        return {"start": start, "losses": [session.loss(session.step(batch)) for batch in session.batches()]}


def test_collectives_of_a_mesh_wait_as_long_as_all_others(ranks: RankPool) -> None:
    text = "task: tests.tasks:Ragged\ntraining: {hang_timeout: 2000, fsdp: {}}\n"
    assert ranks.run(2, work.with_session, text, [], _patience_of_the_mesh) == [4000.0, 4000.0]


def _patience_of_the_mesh(session: Session) -> float:
    group = session.layout.mesh.get_group("shard")
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
