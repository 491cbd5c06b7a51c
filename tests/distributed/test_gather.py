"""A loss over the whole batch: what ranks compute with gathered rows is what one process computes, to the last digits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

from shardwise import Observer, Session, ShardwiseError, gather_batch
from shardwise.engine.run import Run
from shardwise.parallel import Layout, World
from shardwise.parallel.gather import Scope, gathering
from tests.distributed import work
from tests.distributed.pool import RankPool
from tests.tasks import config_of

CONFIG = """
task: tests.gathering:{task}
data: {{samples: {samples}}}
training: {{max_epochs: 2, optimizer: {{name: sgd, lr: 0.05}}}}
"""
TASKS = ["Contrast", "WholeLoss", "Experts"]
WAYS = [(strategy, size, task) for strategy in ("ddp", "zero1", "fsdp") for size in (2, 4) for task in TASKS]
IN_TENSOR_GROUPS = [("tensor", 4, "Contrast"), ("tensor", 4, "WholeLoss")]
"""Two groups of two ranks: rows are gathered over the groups."""


class Gradients(Observer):
    """Of every step, whole."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Tensor]] = []

    def gradients_ready(self, run: Run) -> None:
        self.steps.append({})
        for name, parameter in run.strategy.module.named_parameters():
            grad = parameter.grad
            assert grad is not None, name
            whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
            self.steps[-1][name.replace("_checkpoint_wrapped_module.", "")] = whole.clone()


def gradients(text: str, overrides: list[str]) -> list[dict[str, Tensor]]:
    seen = Gradients()
    with Session(config_of(text, overrides), observers=[seen]) as session:
        session.prepare()
        for batch in session.batches():
            session.step(batch)
    return seen.steps


def assert_same_gradients(one: list[dict[str, Tensor]], other: list[dict[str, Tensor]]) -> None:
    assert len(one) == len(other) > 1
    for mine, expected in zip(one, other, strict=True):
        assert mine.keys() == expected.keys()
        largest = max(float(each.norm()) for each in expected.values())
        for name, each in expected.items():
            assert each.dtype == torch.float64
            assert float((mine[name] - each).norm()) <= 1e-10 * largest, name


@pytest.mark.parametrize(("strategy", "size", "task"), WAYS + IN_TENSOR_GROUPS)
def test_the_gradient_of_ranks_is_that_of_one_process(ranks: RankPool, strategy: str, size: int, task: str) -> None:
    """In every step, the last one of an epoch with it: of 29 samples it has 5, of 25 one, and then most ranks have none."""
    copies = size // 2 if strategy == "tensor" else size
    more = ["training.tensor={size: 2}"] if strategy == "tensor" else []
    for samples in (25, 29):
        text = CONFIG.format(task=task, samples=samples)
        expected = ranks.run(1, gradients, text, ["training.strategy=single", "training.batch_size=12"])[0]
        asked = [f"training.strategy={strategy}", f"training.batch_size={12 // copies}", *more]
        for found in ranks.run(size, gradients, text, asked):
            assert_same_gradients(found, expected)


@pytest.mark.parametrize(
    "options", ["{activation_checkpointing: true}", "{sharding_strategy: HYBRID_SHARD, shard_size: 2}"]
)
def test_what_is_gathered_within_a_block_is_right_when_it_is_sharded_or_computed_again(
    ranks: RankPool, options: str
) -> None:
    text = CONFIG.format(task="Experts", samples=25)
    expected = ranks.run(1, gradients, text, ["training.strategy=single", "training.batch_size=12"])[0]
    asked = [f"training.fsdp={options}", "training.batch_size=3"]
    assert_same_gradients(ranks.run(4, gradients, text, asked)[0], expected)


def test_ranks_that_do_not_gather_compute_another_loss(ranks: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests above compare: they would see it."""
    text = CONFIG.format(task="Contrast", samples=29)
    expected = ranks.run(1, gradients, text, ["training.strategy=single", "training.batch_size=12"])[0]
    found = ranks.run(2, without_gathering, text, ["training.strategy=ddp", "training.batch_size=6"])[0]
    with pytest.raises(AssertionError):
        assert_same_gradients(found, expected)


def without_gathering(text: str, overrides: list[str]) -> list[dict[str, Tensor]]:
    import tests.gathering

    tasks: Any = tests.gathering

    tasks.gather_batch = lambda tensor: (tensor, slice(0, len(tensor)))
    try:
        return gradients(text, overrides)
    finally:
        tasks.gather_batch = gather_batch


# ---------------------------------------------------------------- by itself


def scope_of(world: World, **options: Any) -> Scope:
    return Scope(Layout(world, ()), **options)


def uneven(sizes: list[int]) -> tuple[float, Tensor, list[int]]:
    """The summed loss over all ranks, its gradient by a weight that all ranks have, and this rank's place."""
    world = World.join("cpu", connect=True)
    generator = torch.Generator().manual_seed(0)
    everything = torch.randn(sum(sizes), 5, generator=generator, dtype=torch.float64)
    weight = torch.randn(5, 3, generator=generator, dtype=torch.float64).requires_grad_()
    begin = sum(sizes[: world.rank])
    with gathering(scope_of(world)):
        mine = (everything[begin : begin + sizes[world.rank]] @ weight).tanh()
        rows, own = gather_batch(mine)
        loss = cross_entropy(mine @ rows.T, torch.arange(own.start, own.stop), reduction="sum")
        loss.backward()
    assert torch.equal(rows[own], mine)
    assert weight.grad is not None
    return float(loss.detach()), weight.grad, [own.start, own.stop]


@pytest.mark.parametrize("sizes", [[3, 4], [0, 5], [5, 0], [0, 0], [3, 0, 4, 1], [0, 0, 0, 2], [1, 1, 1, 1]])
def test_rows_may_be_uneven_or_none(ranks: RankPool, sizes: list[int]) -> None:
    (loss, gradient, _), *_ = ranks.run(1, uneven, [sum(sizes)])
    found = ranks.run(len(sizes), uneven, sizes)
    assert sum(each[0] for each in found) == pytest.approx(loss, rel=1e-12)
    assert float((sum(each[1] for each in found) - gradient).norm()) <= 1e-10 * float(gradient.norm())
    assert [each[2] for each in found] == [[sum(sizes[:n]), sum(sizes[: n + 1])] for n in range(len(sizes))]


def test_rows_of_any_type_arrive_as_they_are(ranks: RankPool) -> None:
    for found in ranks.run(2, of_any_type):
        assert found == [True] * 8


def of_any_type() -> list[bool]:
    world = World.join("cpu", connect=True)
    ids = torch.arange(6).view(2, 3)
    rows = [
        ids,
        ids > 2,
        ids.to(torch.int16),
        ids.bfloat16(),
        ids.half(),
        ids.to(torch.complex64),
        ids[:, :0],
        ids.T[:2],
    ]
    with gathering(scope_of(world)):
        found = [(gather_batch(each + 0 if each.dtype != torch.bool else each), each) for each in rows]
    return [torch.equal(gathered.rows, torch.cat([each, each])) for gathered, each in found]


def test_narrow_gradients_are_added_up_in_fp32(ranks: RankPool) -> None:
    """257 in bf16 is 256: of ranks that each say 1 and one that says 256, the ones must not be lost one by one."""
    assert ranks.run(4, narrow) == [260.0] * 4


def narrow() -> float:
    world = World.join("cpu", connect=True)
    mine = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    with gathering(scope_of(world)):
        rows = gather_batch(mine).rows
        (rows.sum() * (257.0 if world.rank == 0 else 1.0)).backward()
    assert mine.grad is not None
    return float(mine.grad)


def test_nobody_sees_the_rows_of_a_rank_without_samples(ranks: RankPool) -> None:
    first, second = ranks.run(2, borrowing)
    assert first == ([0.0, 0.0], [0, 2], [2.0, 2.0])
    assert second == ([0.0, 0.0, 1.0, 1.0], [2, 4], [1.0, 1.0])


def borrowing() -> tuple[list[float], list[int], list[float]]:
    """Rank 1 has two rows of its own for the look of it."""
    world = World.join("cpu", connect=True)
    mine = torch.full((2,), float(world.rank), requires_grad=True)
    with gathering(scope_of(world, borrowed=world.rank == 1)):
        rows, own = gather_batch(mine)
        rows.sum().backward()
    assert mine.grad is not None
    return rows.tolist(), [own.start, own.stop], mine.grad.tolist()


def test_a_single_process_gathers_its_own_rows() -> None:
    mine = torch.ones(3, 2, requires_grad=True)
    rows, own = gather_batch(mine)
    assert rows is mine and own == slice(0, 3)


def test_a_rank_that_tries_something_out_alone_has_as_many_rows_as_all_ranks_will(ranks: RankPool) -> None:
    assert ranks.run(2, trying_out) == [(6, [0, 3])] * 2


def trying_out() -> tuple[int, list[int]]:
    with gathering(scope_of(World.join("cpu", connect=True), alone=True)):
        rows, own = gather_batch(torch.ones(3, 2))
    return len(rows), [own.start, own.stop]


# ---------------------------------------------------------------- evaluation


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_metrics_of_gathered_rows_are_those_of_one_process(ranks: RankPool, strategy: str) -> None:
    """17 samples in batches of 8: of the last, most ranks have nothing."""
    text = CONFIG.format(task="Retrieval", samples=29)
    expected = ranks.run(1, work.with_session, text, ["training.strategy=single", "training.batch_size=8"], evaluated)[
        0
    ]
    assert 0 < expected["found"] < 1
    asked = [f"training.strategy={strategy}", "training.batch_size=2"]
    for found in ranks.run(4, work.with_session, text, asked, evaluated):
        assert found == pytest.approx(expected, rel=1e-10)


def evaluated(session: Session) -> Any:
    return session.evaluate()


# ---------------------------------------------------------------- what is refused


def test_gathering_in_an_accumulated_step_is_refused(ranks: RankPool) -> None:
    text = CONFIG.format(task="Contrast", samples=29)
    with pytest.raises(
        Exception, match="gather_batch does not go with gradient accumulation, here over 3 micro-batches"
    ):
        ranks.run(
            2, gradients, text, ["training.strategy=ddp", "training.batch_size=2", "training.gradient_accumulation=3"]
        )


def test_gathering_in_a_pipeline_is_refused(ranks: RankPool) -> None:
    text = CONFIG.format(task="Chain", samples=29)
    asked = ["training.strategy=pipeline", "training.batch_size=4", "training.gradient_accumulation=2"]
    with pytest.raises(Exception, match=r"gather_batch does not go with strategy pipeline.*Use strategy: ddp or fsdp"):
        ranks.run(2, gradients, text, asked)


def test_gathering_outside_of_a_step_is_refused_where_there_are_other_ranks(ranks: RankPool) -> None:
    with pytest.raises(Exception, match="gather_batch was called outside of a step"):
        ranks.run(2, outside)


def outside() -> None:
    World.join("cpu", connect=True)
    gather_batch(torch.ones(2))


def test_rows_that_do_not_fit_together_are_told_on_every_rank(ranks: RankPool) -> None:
    told = "rank 0 float32 [n, 3], without gradient, rank 1 float32 [n, 4], without gradient"
    assert all(told in each for each in ranks.run(2, misfits, "shape"))
    told = "rank 0 float32 [n, 3], without gradient, rank 1 float32 [n, 3], with gradient"
    assert all(told in each for each in ranks.run(2, misfits, "gradient"))


def misfits(kind: str) -> str:
    world = World.join("cpu", connect=True)
    odd = world.rank == 1
    rows = torch.ones(2, 3 + (odd and kind == "shape"), requires_grad=odd and kind == "gradient")
    with gathering(scope_of(world)), pytest.raises(ShardwiseError) as told:
        gather_batch(rows)
    return str(told.value)


def test_what_has_no_rows_is_refused() -> None:
    with pytest.raises(ShardwiseError, match=r"a single number has none: give it number\[None\]"):
        gather_batch(torch.tensor(1.0))


def test_a_model_that_dp_gives_parts_of_the_batch_to_is_refused() -> None:
    scope = scope_of(World.alone(), cuts_rows=True)
    scope.thread += 1
    with gathering(scope), pytest.raises(ShardwiseError, match="under strategy dp, which gives each device a part"):
        gather_batch(torch.ones(2))
