"""What one group of ranks is asked to do: the user's own program, with a few keys of its config changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from shardwise.config import Batching, Config, resolve_batching
from shardwise.config.registry import ALONE, BUILT_IN, TOGETHER
from shardwise.parallel import strategy_for

SELECTING = set(BUILT_IN["shardwise.strategies"]) - {TOGETHER}
"""Blocks of `training` that choose a strategy by being there. The ddp block holds settings only."""


@dataclass(frozen=True)
class Plan:
    """Which part of the training every run repeats: the same for all of them, decided by the probe."""

    batching: Batching
    """Of the ranks, as configured."""
    steps: int
    window: int
    """Samples per epoch: the last ones of the epoch's order, so that a few steps see its short end."""
    start: int
    """Where in the first epoch the first step begins: it is a ragged one."""
    clip: float


@dataclass(frozen=True)
class Job:
    """One group of ranks. It travels to every rank by pickle."""

    name: str
    folder: Path
    """Records, logs and errors of the ranks."""
    target: Path
    """A config or a program."""
    overrides: tuple[str, ...]
    kind: Literal["probe", "coverage", "train"]
    world: int
    ranks: int
    """Of the run that is being verified; `world` is how many this group has."""
    device: str
    strategy: str | None
    """Asked for on the command line."""
    spread: Literal["whole", "split", "ranks"] = "ranks"
    """One process with the whole batch at once, one process with the ranks' micro-batches, or ranks as configured."""
    same_shares: bool = False
    """One process computes the very micro-batches of the ranks, those of a short batch included."""
    steps: int = 0
    plan: Plan | None = None
    reorder: int | None = None
    """Changes the order of the samples within each batch, and the last digit of the weights: what rounding does."""
    threads: int = 1
    save_at: int | None = None
    kill_at: int | None = None
    resume: bool = False
    run_folder: Path | None = None
    """Where checkpoints go; default: in `folder`."""
    watched: bool = False
    """PyTorch compares the ranks' collectives with each other."""
    shared: Path | None = None
    """Task and data that took long to make, made by the probe."""
    planted: str | None = None
    """Import path of a function that plants a bug: for the tests of verify itself."""

    def record(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.pt"

    def progress(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.jsonl"

    def log(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.log"

    def stack(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.stack"


@dataclass(frozen=True)
class Changes:
    """Keys of the block `training`: set, or left out."""

    put: dict[str, Any] = field(default_factory=dict)
    leave_out: frozenset[str] = frozenset()

    def applied(self, config: Config, **top: Any) -> Config:
        values = config.model_dump(exclude_unset=True)
        training = values.setdefault("training", {})
        for key in self.leave_out:
            training.pop(key, None)
        training.update(self.put)
        values.update(top)
        return type(config).model_validate(values)


def as_asked(config: Config, job: Job) -> Config:
    """The config of the run that is being verified, with the strategy of the command line."""
    if job.strategy is None:
        return config
    others = frozenset(SELECTING - {job.strategy})
    return Changes({"strategy": job.strategy}, others).applied(config)


def config_for(config: Config, job: Job) -> Config:
    """The config of one run of the proof. Whatever is not said here stays as the user wrote it."""
    asked = as_asked(config, job)
    batching = job.plan.batching if job.plan else batching_of(asked, job.ranks)
    put: dict[str, Any] = {"max_epochs": max(1000, job.steps), "max_steps": job.steps, "device": job.device}
    leave_out = {"num_gpus", "checkpoint_dir", "total_batch_size"}
    if job.plan:
        put["gradient_clip"] = job.plan.clip
    if job.world == 1 and job.spread != "ranks":
        put["strategy"] = ALONE
        leave_out |= SELECTING | {"num_nodes"}
    if job.spread == "whole":
        put |= {"batch_size": batching.global_batch, "gradient_accumulation": 1}
    else:
        copies = 1 if job.spread == "split" else strategy_for(asked, job.world).copies(job.world)
        per_rank = batching.world * batching.accumulation // copies
        put |= {"batch_size": batching.batch_size, "gradient_accumulation": per_rank}
    if asked.training.ddp.comm_hook != "none":  # compressed gradients are other gradients, by design
        put["ddp"] = asked.training.ddp.model_dump(exclude_unset=True) | {"comm_hook": "none"}
    folder = job.run_folder or job.folder / "run"
    return Changes(put, frozenset(leave_out)).applied(asked, run_dir=str(folder))


def batching_of(config: Config, ranks: int) -> Batching:
    """Among the copies of the model that so many ranks hold: those of a pipeline share one."""
    return resolve_batching(config.training, strategy_for(config, ranks).copies(ranks))


def environment_for(rank: int, job: Job, port: int, environ: Mapping[str, str]) -> dict[str, str]:
    """A rank's environment: this process's, and its place among the ranks."""
    ours = {key: value for key, value in environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    if job.world == 1 and job.spread != "ranks":
        return ours
    # Collectives that do not match are named, instead of hanging or returning rubbish; it costs time, so once is enough.
    watched = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "TORCH_CPP_LOG_LEVEL": "ERROR"} if job.watched else {}
    return (
        ours
        | watched
        | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(job.world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    )
