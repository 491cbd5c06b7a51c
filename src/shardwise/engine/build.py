"""From a task to what a step needs: the model on the ranks, and everything that is made for it afterwards."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from shardwise.config import Config, resolve_learning_rate
from shardwise.engine.batch_plan import BatchPlan
from shardwise.engine.optimizer import build_optimizer
from shardwise.engine.parts import Parts
from shardwise.engine.precision import Precision
from shardwise.engine.schedule import Schedule
from shardwise.kernels.low_precision_adamw import LowPrecisionAdamW
from shardwise.parallel import ModelSpec
from shardwise.parallel.recipe import Trial
from shardwise.tasks import Task

COMPILING_PAYS_AFTER = 200
"""Steps of a run from which on its blocks are compiled by default."""


def build_parts(
    config: Config, task: Task, plan: BatchPlan, build: Callable[[], nn.Module], trial: Trial, total_steps: int
) -> Parts:
    """`build`: makes the model. `trial`: the loss of a few samples."""
    training, strategy, world = config.training, plan.strategy, plan.layout.world
    spec = ModelSpec(
        build=build,
        find_blocks=task.blocks,
        find_regions=task.regions if _compiles(config, plan, total_steps) else None,
        tensor_plan=task.tensor_plan,
        trial=trial,
        micro_batches=plan.batching.accumulation,
        one_size=task.one_size,
        low_precision=task.narrow_weights if training.narrow_weights == "auto" else training.narrow_weights,
    )
    strategy.wrap(spec, plan.layout)
    lr = resolve_learning_rate(training, plan.batching.global_batch)
    precision = Precision(training.precision, world.device.type)
    precision.set_backends()
    scaler = precision.scaler()
    from_copies = strategy.regions is not None and not scaler.is_enabled() and not strategy.shards_optimizer
    optimizer = build_optimizer(
        strategy.module,
        training.optimizer,
        lr,
        blocks=task.blocks(strategy.module),
        make=strategy.make_optimizer,
        copies=strategy.low_precision if from_copies else None,
    )
    strategy.updates_from_copies = isinstance(optimizer, LowPrecisionAdamW)
    strategy.model.train()
    return Parts(
        config, task, world, strategy, optimizer, Schedule(training.scheduler, lr, total_steps), precision, scaler
    )


def _compiles(config: Config, plan: BatchPlan, total_steps: int) -> bool:
    """Whether the model's blocks are compiled. It follows from the config alone, so that a resumed run does the same."""
    wanted = config.training.compile
    if wanted == "auto":
        proven = plan.layout.world.device.type == "cuda" and plan.strategy.compiles
        return proven and total_steps >= COMPILING_PAYS_AFTER
    return wanted
