"""When blocks are recorded as CUDA graphs. What recording does is tested on a GPU."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.config import with_batch_size
from shardwise.data import StepBatch
from shardwise.engine import graphs as graphs_module
from shardwise.engine import run_ahead as run_ahead_module
from shardwise.engine.batch_plan import BatchPlan
from shardwise.engine.fit import fit
from shardwise.engine.graphs import WATCHED, Graphs
from shardwise.engine.session import Session
from shardwise.engine.step_result import StepResult
from shardwise.errors import ConfigError, OutOfMemory, ShardwiseError
from shardwise.kernels.regions import Regions, compile_regions
from shardwise.parallel import World, recipe, strategy_class
from shardwise.tasks import Loss
from tests.distributed import work
from tests.engine.test_ahead import run_ahead
from tests.tasks import Ragged, config_of

TEXT = """
task: tests.engine.test_graphs:Even
training: {batch_size: 4, compile: false, max_epochs: 2, optimizer: {lr: 0.01}}
"""
HOST = {"wait": 0.001, "agree": 0.0, "compute": 0.02, "update": 0.003, "forward": 0.01}
"""Seconds of a step."""
MANY = 10_000
"""Steps left."""


class Even(Ragged):
    one_size = True


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """One whose blocks are compiled, by PyTorch's `eager` backend, and which takes its device for a GPU where it is asked to."""
    torch._dynamo.reset()
    limit = torch._dynamo.config.patch(recompile_limit=torch._dynamo.config.recompile_limit)
    with limit, Session(config_of(TEXT, work.folder_of(tmp_path))) as session:
        session.prepare()
        spread = session.parts.strategy
        spread.regions = compile_regions(session.task.blocks(spread.module), backend="eager", one_size=True)
        monkeypatch.setattr(Graphs, "_memory_used", lambda self: 0.1)
        yield session


def graphs_of(session: Session, wanted: bool | str, strategy: str = "single", accumulation: int = 1) -> Graphs | None:
    training = session.config.training.model_copy(update={"cuda_graphs": wanted})
    session.parts.config = session.config.model_copy(update={"training": training})
    laid = strategy_class(strategy)(training)
    laid.regions = session.strategy.regions
    parts = replace(session.parts, strategy=laid, world=replace(session.world, device=torch.device("cuda")))
    graphs = Graphs.of(parts, accumulation)
    if graphs is not None:
        session.observers.append(graphs)
    return graphs


def watched(graphs: Graphs | None, *, idle: int = WATCHED, left: int = MANY, **times: float) -> bool:
    """Whether blocks are recorded after so many steps of a kind."""
    assert graphs is not None
    for number in range(WATCHED + 1):
        assert not graphs.regions.replays
        made(graphs, StepResult(number + 1, device_idle=number < idle, times={**HOST, **times}), WATCHED + left)
    return graphs.regions.replays


def made(graphs: Graphs, result: StepResult, total_steps: int, compiling: float = 0.0) -> None:
    """A step, as a session tells of it."""
    run: Any = SimpleNamespace(total_steps=total_steps)
    graphs.before_step(run, StepBatch())
    graphs.regions.seconds += compiling
    graphs.after_step(run, StepBatch(), result)


def test_where_the_device_waits_for_the_host_blocks_are_recorded(
    session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="shardwise"):
        assert watched(graphs_of(session, "auto"))
    (line,) = caplog.messages
    assert line.startswith(f"step {WATCHED + 1}: the GPU waits for the host in 100% of the steps")


@pytest.mark.parametrize(
    ("steps", "recorded"),
    [
        pytest.param({"idle": round(0.8 * WATCHED)}, True, id="in between it logs"),
        pytest.param({"idle": round(0.8 * WATCHED) - 1}, False, id="the device is busy"),
        pytest.param({"wait": 0.01}, False, id="it waits for data"),
        pytest.param({"left": 10}, False, id="too few steps are left to pay for compiling"),
    ],
)
def test_where_it_pays_only(session: Session, steps: dict[str, Any], recorded: bool) -> None:
    session.parts.strategy.regions.seconds = 5.0  # type: ignore[union-attr]
    assert watched(graphs_of(session, "auto"), **steps) is recorded


@pytest.mark.parametrize("compiling", [1, 5])
def test_a_step_that_compiles_is_not_counted(session: Session, compiling: int) -> None:
    """A session watches a step when the next has been prepared."""
    graphs = graphs_of(session, "auto")
    assert graphs is not None

    for number in range(1, 60):
        slow = number == compiling
        result = StepResult(number, device_idle=True, times={**HOST, "compute": 5.0 if slow else 0.02})
        made(graphs, result, number + 150, compiling=5.0 * slow)
    assert not graphs.regions.replays, "with 5 s in one of twenty steps it would seem to pay"


def test_there_must_be_room(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Graphs, "_memory_used", lambda self: 0.6)
    assert not watched(graphs_of(session, "auto"))


def test_a_model_that_does_not_compile_is_not_recorded(session: Session) -> None:
    graphs = graphs_of(session, "auto")
    session.parts.strategy.regions.give_up(RuntimeError("no such instruction"))  # type: ignore[union-attr]
    assert not watched(graphs)


def test_asked_for_it_is_done_at_once_and_not_wanted_never(session: Session) -> None:
    assert graphs_of(session, False) is None
    graphs = graphs_of(session, True)
    assert graphs is not None and graphs.regions.replays


def _other_sizes(session: Session) -> None:
    session.task.one_size = False


def _compiles_nothing(session: Session) -> None:
    session.parts.strategy.regions = None


def _has_no_blocks(session: Session) -> None:
    session.parts.strategy.regions = compile_regions([])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param(_other_sizes, "needs samples of one size, which this task does not promise", id="sizes"),
        pytest.param(_compiles_nothing, "records compiled blocks, and this run has none", id="not compiled"),
        pytest.param(_has_no_blocks, "records compiled blocks, and this run has none", id="no blocks"),
    ],
)
def test_where_it_cannot_be_it_is_refused_and_by_default_left_out(
    session: Session, change: Callable[[Session], None], said: str
) -> None:
    change(session)
    assert graphs_of(session, "auto") is None
    with pytest.raises(ConfigError, match=rf"training\.cuda_graphs: true {said}"):
        graphs_of(session, True)


def test_by_default_it_is_left_out_with_other_ranks_and_with_accumulation(session: Session) -> None:
    assert graphs_of(session, "auto", strategy="ddp") is None
    assert graphs_of(session, "auto", accumulation=3) is None


@pytest.mark.parametrize(
    ("options", "device", "said"),
    [
        ([], "cpu", "needs a CUDA device; auto records where there is one"),
        (
            ["training.batch_size=auto"],
            "cuda",
            "does not go with batch_size: auto, which leaves no memory for recordings",
        ),
        (["training.strategy=fsdp"], "cuda", "does not go with strategy fsdp"),
        (
            ["training.gradient_accumulation=3"],
            "cuda",
            "does not go with gradient accumulation, here over 3 micro-batches",
        ),
    ],
)
def test_what_the_config_cannot_have_is_refused_before_anything_is_read(
    options: list[str], device: str, said: str
) -> None:
    config = config_of(TEXT, ["training.cuda_graphs=true", *options])
    finds = config.training.batch_size == "auto"
    world = World(rank=0, size=1, device=torch.device(device), local_rank=0, connected=False)
    with pytest.raises(ConfigError, match=rf"training\.cuda_graphs: true {said}"):
        BatchPlan.of(with_batch_size(config, 4) if finds else config, world, elastic=False, finds_batch_size=finds)


def steps_of(session: Session, number: int) -> list[float]:
    batches = session.batches()
    found = [session.loss(session.step(next(batches))) for _ in range(number)]
    batches.close()
    return found


class Fails(torch.autograd.Function):
    """As PyTorch does: two errors, the second of which says little."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, problem: str) -> torch.Tensor:
        ctx.problem = problem
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        try:
            raise RuntimeError(ctx.problem)
        finally:
            raise RuntimeError("CUDA error: unknown")


@pytest.mark.parametrize(
    ("problem", "kind", "said"),
    [
        ("operation not permitted when\nstream is capturing", ShardwiseError, r"Set training\.cuda_graphs: false"),
        ("accessing tensor output of CUDAGraphs that has been overwritten", ShardwiseError, r"cuda_graphs: false"),
        ("CUDA out of memory, during capture", OutOfMemory, "memory"),
        ("index out of range", RuntimeError, "CUDA error: unknown"),
    ],
)
def test_an_error_of_recording_says_what_to_do_and_others_what_they_are(
    session: Session, problem: str, kind: type[Exception], said: str
) -> None:
    graphs_of(session, True)
    block = session.task.blocks(session.parts.strategy.module)[-1]
    block.register_forward_hook(lambda block, given, result: Fails.apply(result, problem))
    with pytest.raises(kind, match=said) as raised:
        steps_of(session, 1)
    assert raised.type is kind


class Static(torch.autograd.Function):
    """Writes its result where it wrote the last one, as a CUDA graph does."""

    place = torch.zeros(())

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return Static.place.copy_(loss).view_as(Static.place)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient


class InPlace(Even):
    """The second step's loss is not finite."""

    steps = 0
    loss_is_a_sum = False  # it counts its calls: the first step asks nothing more of it

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> Loss:
        InPlace.steps += 1
        loss = super().loss(model, batch)
        return Loss(Static.apply(loss.sum * (math.nan if InPlace.steps == 2 else 1.0)), loss.count)


def test_the_samples_to_blame_are_known_when_the_next_step_has_written_over_the_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_ahead(monkeypatch)
    monkeypatch.setattr(InPlace, "steps", 0)
    config = config_of(TEXT.replace(":Even", ":InPlace"), ["training.strategy=single", *work.folder_of(tmp_path)])
    with Session(config) as session:
        session.prepare()
        batches = session.batches()
        session.step(next(batches))
        second = next(batches)
        session.step(second)
        bad_losses = []
        monkeypatch.setattr(
            run_ahead_module, "blame", lambda parts, verdict, bad_loss: bad_losses.append(bad_loss) or bad_loss
        )
        monkeypatch.setattr(run_ahead_module, "stop_because", lambda *given: ShardwiseError("stopped"))
        with pytest.raises(ShardwiseError, match="stopped"):
            session.step(next(batches))
        assert bad_losses[0].guilty and bad_losses[0].samples == second.ids


def test_a_run_is_watched_recorded_and_tells_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of it but the GPU: what is recorded is compiled by PyTorch's `eager` backend, and marks are counted."""
    torch._dynamo.reset()
    run_ahead(monkeypatch)
    read_later = run_ahead_module._read_later

    def idle(parts: Any, result: StepResult, *given: Any) -> None:
        read_later(parts, result, *given)
        read = result.awaited
        assert read is not None
        result.awaited = lambda: (read(), True)[1]

    monkeypatch.setattr(run_ahead_module, "_read_later", idle)
    monkeypatch.setattr(recipe, "compile_regions", partial(compile_regions, backend="eager"))
    monkeypatch.setattr(graphs_module, "LEAST_GAIN", 1e6)  # how long steps take here means nothing
    monkeypatch.setattr(graphs_module, "MOST_WAITING", 2.0)
    monkeypatch.setattr(Graphs, "_memory_used", lambda self: 0.1)
    monkeypatch.setattr(
        Graphs, "of", classmethod(lambda cls, parts, *given: cls(parts, parts.strategy.regions, now=False))
    )
    marked, replayed = [], []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: marked.append(True))
    replay = Regions.replay
    monkeypatch.setattr(Regions, "replay", lambda self: (replayed.append(self), replay(self)))
    options = ["training.compile=true", "training.strategy=single", "training.max_epochs=40", "training.log_every_n_steps=7",
               "training.eval_at_start=false", "training.eval_every_n_steps=1000"]  # fmt: skip
    config = config_of(TEXT, [*options, *work.folder_of(tmp_path)])
    outcome = fit(config)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "recorded as CUDA graphs" in line]
    found = re.fullmatch(r"step (\d+): the GPU waits for the host in 100% of the steps, so .*", line)
    # The first step compiles; of every seventh the log asks for the loss; a step is watched when the next is there.
    assert found and int(found[1]) == 1 + WATCHED + 3 + 1
    assert len(replayed) == 1 and len(marked) == outcome.steps - int(found[1])


def test_recording_is_asked_of_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "compile", lambda plain, **options: asked.append(options) or plain)
    blocks: list[nn.Module] = [nn.Linear(2, 2), nn.Linear(2, 2)]
    regions = compile_regions(blocks, one_size=True)
    asked.clear()
    regions.replay()
    assert asked == 2 * [{"backend": "inductor", "dynamic": False, "options": {"triton.cudagraphs": True}}]
