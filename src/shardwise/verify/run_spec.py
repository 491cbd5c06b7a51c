"""What one group of ranks is asked to do: the user's own program, with a few keys of its config changed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shardwise.config import Batching, Config, resolve_batching
from shardwise.config.registry import ALONE, selecting_blocks
from shardwise.parallel import strategy_for


@dataclass(frozen=True)
class Plan:
    """Which part of the training every run repeats: the same for all of them, decided by the probe."""

    batching: Batching
    """Of the ranks, as configured."""
    window: int
    """Samples per epoch: the last ones of the epoch's order, so that a few steps see its short end."""
    start: int
    """Where in the first epoch the first step begins: it is a ragged one."""
    clip: float
    gathers: bool = False
    """The loss looks at the rows of all ranks together: a global batch is never taken apart into several micro-batches."""


@dataclass(frozen=True)
class Interpreter:
    """A rank that is not forked from the server."""

    hash_seed: int
    listing: str = "natural"
    """In which order folders give their files: natural, reversed, or mixed by a number."""
    wait: float = 0.0
    """Seconds, before it makes its data."""
    order: int = 0
    """In which order the samples are read: another number, another order."""
    threads: int = 1


@dataclass(frozen=True)
class RunSpec:
    """One run of the proof, by one group of ranks. It travels to every rank by pickle."""

    name: str
    folder: Path
    """Records, logs and errors of the ranks; and the run folder."""
    target: Path
    """A config or a program."""
    values: dict[str, Any] | None
    """Of the config, with its overrides; None: a program, which has its own."""
    kind: Literal["probe", "data", "coverage", "train"]
    world: int
    ranks: int
    """Of the run that is being verified; `world` is how many this group has."""
    device: str
    strategy: str | None
    """Asked for on the command line."""
    precision: str | None = None
    """Instead of the config's."""
    batches: Literal["ranks", "whole", "split", "shares"] = "ranks"
    """As the ranks are configured. Or by one process: each global batch at once, in as many micro-batches as the ranks make of
    it, or in the very micro-batches of the ranks, those of a short batch included."""
    steps: int = 0
    plan: Plan | None = None
    reorder: int | None = None
    """Changes the order of the samples within each batch, and the last digit of the weights: what rounding does."""
    threads: int = 1
    save_at: int | None = None
    kill_at: int | None = None
    resume: bool = False
    follow: Path | None = None
    """The run folder of another run: each step begins with the weights and moments that one had."""
    keep_every_step: bool = False
    """Checkpoints, for others to follow; and the gradients of every step."""
    evaluate_at: int | None = None
    """Evaluate when so many steps are made."""
    evaluate_last: bool = False
    """And after the last one."""
    valid_samples: int = 0
    """At most, in an evaluation."""
    interpreters: tuple[Interpreter, ...] = ()
    """By rank; none: they are forked from the server."""
    watched: bool = False
    """PyTorch compares the ranks' collectives with each other."""
    shared: Path | None = None
    """Task and data that took long to make, made by the probe."""
    planted: str | None = None
    """Import path of a function that plants a bug: for the tests of verify itself."""

    @property
    def run_folder(self) -> Path:
        return self.folder / "run"

    def record(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.pt"

    def steps_file(self, rank: int) -> Path:
        """What it wrote down after each step."""
        return self.folder / f"rank-{rank}.jsonl"


def as_asked(config: Config, strategy: str | None) -> Config:
    """The config of the run that is being verified: with the strategy of the command line, if one was given there."""
    if strategy is None:
        return config
    return _changed(config, {"strategy": strategy}, selecting_blocks() - {strategy})


def in_precision(config: Config, precision: str | None) -> Config:
    return config if precision is None else _changed(config, {"precision": precision}, ())


def config_for(config: Config, spec: RunSpec) -> Config:
    """The config of one run of the proof. Whatever is not said here stays as the user wrote it."""
    asked = as_asked(config, spec.strategy)
    batching = spec.plan.batching if spec.plan else batching_of(asked, spec.ranks)
    put: dict[str, Any] = {"max_epochs": max(1000, spec.steps), "max_steps": spec.steps, "device": spec.device}
    drop = {"num_gpus", "checkpoint_dir", "total_batch_size"}
    if spec.plan:
        put["gradient_clip"] = spec.plan.clip
    if spec.keep_every_step:
        put |= {"keep_last": spec.steps + 1}
    if spec.batches != "ranks":
        put["strategy"] = ALONE
        drop |= selecting_blocks() | {"num_nodes"}
    if spec.batches == "whole":
        put |= {"batch_size": batching.global_batch, "gradient_accumulation": 1}
    else:
        copies = strategy_for(asked, spec.world).copies(spec.world) if spec.batches == "ranks" else 1
        per_copy = batching.world * batching.accumulation // copies
        size, accumulation = batching.batch_size, per_copy
        if spec.plan and spec.plan.gathers:
            size, accumulation = size * per_copy, 1
        put |= {"batch_size": size, "gradient_accumulation": accumulation}
    if asked.training.ddp.comm_hook != "none":  # compressed gradients are other gradients, by design
        put["ddp"] = asked.training.ddp.model_dump(exclude_unset=True) | {"comm_hook": "none"}
    return _changed(asked, put, drop, run_dir=str(spec.run_folder))


def batching_of(config: Config, ranks: int) -> Batching:
    """Among the copies of the model that so many ranks hold: those of a pipeline share one."""
    return resolve_batching(config.training, strategy_for(config, ranks).copies(ranks))


def _changed(config: Config, put: dict[str, Any], drop: Iterable[str], **top: Any) -> Config:
    """With keys of the block `training` set or dropped, and others of the config set."""
    values = config.model_dump(exclude_unset=True)
    training = {key: value for key, value in values.get("training", {}).items() if key not in drop}
    return type(config).model_validate({**values, **top, "training": training | put})
