"""When blocks are recorded as CUDA graphs. What recording does is tested on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.engine.graphs import WATCHED, Graphs
from shardwise.engine.monitor import Monitor
from shardwise.engine.session import Session
from shardwise.engine.step import StepResult
from shardwise.errors import ConfigError, ShardwiseError
from shardwise.kernels.regions import compile_regions
from shardwise.watch.console import Console
from shardwise.watch.run_folder import RunFolder
from tests.distributed import work
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
    with Session(config_of(TEXT, work.folder_of(tmp_path))) as session:
        session.prepare()
        spread = session.parts.spread
        spread.regions = compile_regions(session.task.blocks(spread.module), backend="eager", one_size=True)
        monkeypatch.setattr(Graphs, "_memory_used", lambda self: 0.1)
        yield session


def graphs_of(session: Session, wanted: bool | str, strategy: str = "single", accumulation: int = 1) -> Graphs | None:
    training = session.config.training.model_copy(update={"cuda_graphs": wanted})
    session.parts.config = session.config.model_copy(update={"training": training})
    device, session.world.device = session.world.device, torch.device("cuda")
    try:
        return Graphs.of(session.parts, strategy, accumulation)
    finally:
        session.world.device = device


def watched(graphs: Graphs | None, *, idle: int = WATCHED, left: int = MANY, **times: float) -> bool:
    """Whether blocks are recorded after so many steps of a kind."""
    assert graphs is not None
    for number in range(WATCHED):
        assert not graphs.regions.replays
        graphs.watch(StepResult(number + 1, device_idle=number < idle, times={**HOST, **times}), left)
    return graphs.regions.replays


def test_where_the_device_waits_for_the_host_blocks_are_recorded(session: Session) -> None:
    graphs = graphs_of(session, "auto")
    assert watched(graphs)
    assert graphs is not None and graphs.news.startswith("the GPU waits for the host in 100% of the steps")


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
    session.parts.spread.regions.seconds = 5.0  # type: ignore[union-attr]
    assert watched(graphs_of(session, "auto"), **steps) is recorded


def test_a_step_that_compiles_is_not_counted(session: Session) -> None:
    graphs = graphs_of(session, "auto")
    assert graphs is not None
    graphs.regions.seconds = 5.0
    graphs.watch(StepResult(1, device_idle=True, times={**HOST, "compute": 5.0}), MANY)
    assert not watched(graphs, left=150)


def test_there_must_be_room(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Graphs, "_memory_used", lambda self: 0.6)
    assert not watched(graphs_of(session, "auto"))


def test_asked_for_it_is_done_at_once_and_not_wanted_never(session: Session) -> None:
    assert graphs_of(session, False) is None
    graphs = graphs_of(session, True)
    assert graphs is not None and graphs.regions.replays


def _other_sizes(session: Session) -> None:
    session.task.one_size = False


def _compiles_nothing(session: Session) -> None:
    session.parts.spread.regions = None


@pytest.mark.parametrize(
    ("change", "options", "said"),
    [
        pytest.param(_other_sizes, {}, "needs samples of one size, which this task does not promise", id="sizes"),
        pytest.param(_compiles_nothing, {}, "set training.compile: true", id="not compiled"),
        pytest.param(None, {"strategy": "ddp"}, "does not go with strategy ddp", id="ddp"),
        pytest.param(None, {"accumulation": 3}, "accumulation, here over 3 micro-batches", id="accumulation"),
    ],
)
def test_where_it_cannot_be_it_is_refused_and_by_default_left_out(
    session: Session, change: Callable[[Session], None] | None, options: dict[str, Any], said: str
) -> None:
    if change is not None:
        change(session)
    assert graphs_of(session, "auto", **options) is None
    with pytest.raises(ConfigError, match=rf"training\.cuda_graphs: true .*{said}"):
        graphs_of(session, True, **options)


def test_on_a_cpu_it_is_refused(tmp_path: Path) -> None:
    config = config_of(TEXT, ["training.cuda_graphs=true", *work.folder_of(tmp_path)])
    with pytest.raises(ConfigError, match="needs a CUDA device, and this is a cpu"), Session(config) as session:
        session.prepare()


def steps_of(session: Session, number: int) -> list[float]:
    batches = session.batches()
    found = [session.loss(session.step(next(batches))) for _ in range(number)]
    batches.close()
    return found


class Fails(torch.autograd.Function):
    """As PyTorch does where a block does something that cannot be recorded: two errors, the second of which says little."""

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


def test_what_cannot_be_recorded_says_what_to_do(session: Session) -> None:
    session.graphs = graphs_of(session, True)
    _fails_with(session, "operation not permitted when\nstream is capturing")
    with pytest.raises(ShardwiseError, match=r"cannot be recorded as CUDA graphs: .* Set training\.cuda_graphs: false"):
        steps_of(session, 1)


def test_other_errors_are_told_as_they_are(session: Session) -> None:
    session.graphs = graphs_of(session, True)
    _fails_with(session, "index out of range")
    with pytest.raises(RuntimeError, match="CUDA error: unknown"):
        steps_of(session, 1)


def _fails_with(session: Session, problem: str) -> None:
    block = session.task.blocks(session.parts.spread.module)[-1]
    block.register_forward_hook(lambda block, given, result: Fails.apply(result, problem))


def test_the_log_tells_of_it_once(session: Session, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(0, 1, tmp_path)
    monitor = Monitor(session, RunFolder(tmp_path / "run"), console)
    session.graphs = graphs_of(session, "auto")
    assert watched(session.graphs)
    for _ in range(2):
        monitor._mind_the_graphs()
    console.close()
    assert capsys.readouterr().out.count("recorded as CUDA graphs (training.cuda_graphs: false") == 1
