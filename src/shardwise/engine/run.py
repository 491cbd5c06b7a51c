"""What is seen of a run from outside: by observers, and by whoever works on one. Session is one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from shardwise.config import Batching, Config
from shardwise.data import GlobalOrder
from shardwise.engine.checkpointing import Checkpoints
from shardwise.engine.parts import Parts
from shardwise.engine.state import RunState
from shardwise.engine.step_result import StepResult
from shardwise.parallel import Layout, Strategy, World
from shardwise.tasks import Task


class Run(Protocol):
    config: Config
    world: World
    state: RunState
    checkpoints: Checkpoints
    task: Task
    train_data: Any
    valid_data: Any

    @property
    def observers(self) -> Sequence[object]: ...
    @property
    def strategy(self) -> Strategy: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def batching(self) -> Batching: ...
    @property
    def parts(self) -> Parts: ...
    @property
    def model(self) -> nn.Module: ...
    @property
    def steps_done(self) -> int: ...
    @property
    def total_steps(self) -> int: ...
    def order(self) -> GlobalOrder: ...
    def loss(self, *results: StepResult) -> float: ...
    def save(self, metrics: dict[str, float] | None = None) -> Path: ...
    def wait(self) -> None: ...
    def evaluate(self) -> dict[str, float] | None: ...
    def resume(self, which: str = "auto") -> Path | None: ...
