"""Bugs of distributed training, each a small patch of shardwise itself, applied in the processes that verify starts.

What people get wrong in loops of their own: verify must catch every one of them here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardwise.checkpoint import state
from shardwise.config.seeds import Purpose
from shardwise.data import Cursor, GlobalOrder, StepBatch
from shardwise.data.order import GlobalBatch
from shardwise.data.seeding import seed_everything
from shardwise.engine import forward_passes
from shardwise.engine import session as session_module
from shardwise.engine.session import Session
from shardwise.engine.state import RunState
from shardwise.parallel import recipe as recipe_module
from shardwise.parallel import strategy as strategy_module
from shardwise.parallel.strategies import ddp as ddp_module
from shardwise.parallel.strategies.ddp import DistributedDataParallelStrategy
from shardwise.parallel.strategy import Strategy
from shardwise.tasks import Loss
from tests.tasks import Ragged, Toy

recipe: Any = recipe_module
strategies: Any = strategy_module
ddp: Any = ddp_module
engine: Any = session_module
steps: Any = forward_passes
checkpoints: Any = state
RANK = "RANK"


def _rank() -> int:
    return int(os.environ.get(RANK, "0"))


# ---------------------------------------------------------------- how the loss is divided


def each_micro_batch_takes_its_own_mean() -> None:
    steps.loss_weight = lambda world, count, micro: 1 / micro


def the_average_over_ranks_is_not_made_up_for() -> None:
    steps.loss_weight = lambda world, count, micro: 1 / count


def gradients_are_added_up_instead_of_averaged() -> None:
    steps.loss_weight = lambda world, count, micro: world * world / count


def gradients_of_ranks_are_two_percent_too_large() -> None:
    steps.loss_weight = lambda world, count, micro: world / count * (1.02 if world > 1 else 1)


def accumulation_leaves_out_the_last_micro_batch() -> None:
    run_step = engine.run_step

    def short(parts: Any, batch: StepBatch, *args: Any, **options: Any) -> Any:
        kept = batch.micro[:-1] if len(batch.micro) > 1 else batch.micro
        return run_step(parts, replace(batch, micro=kept), *args, **options)

    engine.run_step = short


def the_reported_loss_is_rank_zeros() -> None:
    Session.loss = lambda self, *results: results[0].loss_sum / max(1, results[0].count)  # type: ignore[method-assign]


# ---------------------------------------------------------------- what is synchronised


def nothing_is_synchronised() -> None:
    before = DistributedDataParallelStrategy.reducing_gradients

    @contextmanager
    def never(self: DistributedDataParallelStrategy, last: bool = True, *, only: bool = False) -> Iterator[None]:
        with before(self, False, only=only):
            yield

    DistributedDataParallelStrategy.reducing_gradients = never  # type: ignore[method-assign]


def one_parameter_is_not_synchronised() -> None:
    replicate = ddp.replicate

    def forgetful(module: nn.Module, *args: Any) -> Any:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["norm.weight"])
        if _rank():  # DDP sends what it ignores to nobody
            nn.init.ones_(module.norm.weight)  # type: ignore[arg-type, union-attr]
        return replicate(module, *args)

    ddp.replicate = forgetful


def every_rank_seeds_its_own_weights() -> None:
    class Unsent(DistributedDataParallel):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options | {"init_sync": False})

    def build(self: Session) -> nn.Module:
        seed_everything(self.config.seed + self.world.rank, Purpose.WEIGHTS)
        return self.task.build_model()

    Session._build = build  # type: ignore[method-assign]
    recipe.build_shape = lambda build: build()
    ddp.DistributedDataParallel = Unsent


def buffers_are_not_sent_at_the_start() -> None:
    def forget(model: nn.Module, whole: Any, world: Any) -> None:
        for name, buffer in model.named_buffers():
            if world.rank:
                buffer.fill_(0.0)
            elif name in whole:
                buffer.copy_(whole[name])

    recipe.broadcast_buffers = forget


def running_buffers_are_not_shared() -> None:
    Strategy.share_buffers = lambda self: None  # type: ignore[method-assign]


def only_rank_zero_updates() -> None:
    prepare = Session.prepare

    def lazy(self: Session, *args: Any, **options: Any) -> nn.Module:
        model = prepare(self, *args, **options)
        if self.world.rank:
            self.parts.optimizer.step = lambda *args, **options: None  # type: ignore[assignment, method-assign]
        return model

    Session.prepare = lazy  # type: ignore[method-assign]


def the_norm_is_that_of_a_ranks_own_shards() -> None:
    def own(grads: list[Any]) -> torch.Tensor:
        return torch.stack(
            [each.to_local().norm() if hasattr(each, "to_local") else each.norm() for each in grads]
        ).norm()

    strategies.global_norm = own


def tied_weights_are_split() -> None:
    materialize = recipe.materialize

    def untied(model: Any, device: Any) -> None:
        materialize(model, device)
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())

    recipe.materialize = untied


def the_rate_grows_with_the_number_of_ranks() -> None:
    prepare = Session.prepare

    def eager(self: Session, *args: Any, **options: Any) -> nn.Module:
        model = prepare(self, *args, **options)
        self.parts.schedule = replace(self.parts.schedule, peak=self.parts.schedule.peak * self.world.size)
        return model

    Session.prepare = eager  # type: ignore[method-assign]


# ---------------------------------------------------------------- what only some ranks compute


def one_rank_has_a_loss_term_of_its_own() -> None:
    """One process is rank 0 too, so all of its samples have the term."""

    def loss(self: Ragged, model: nn.Module, batch: dict[str, torch.Tensor]) -> Loss:
        targets = batch["ids"][:, 1:]
        logits = model(batch["ids"][:, :-1].clamp(min=0)).float()
        total = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum")
        if _rank() == 0:
            total = total + 0.1 * logits.logsumexp(-1)[targets >= 0].square().sum()
        return Loss(total, (targets >= 0).sum())

    Ragged.loss = loss  # type: ignore[method-assign]


def one_rank_runs_its_blocks_twice() -> None:
    def forward(self: Toy, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids) * self.slope
        for layer in [*self.layers] * (1 + _rank()):
            hidden = layer(hidden)
        return self.head(self.norm(hidden))

    Toy.forward = forward  # type: ignore[method-assign]


def one_rank_detaches_a_parameter() -> None:
    def forward(self: Toy, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids) * self.slope
        for layer in self.layers:
            hidden = layer(hidden)
        weight = self.norm.weight.detach() if _rank() else self.norm.weight
        return self.head(nn.functional.layer_norm(hidden, weight.shape, weight, self.norm.bias))

    Toy.forward = forward  # type: ignore[method-assign]


# ---------------------------------------------------------------- which samples


def every_epoch_has_the_same_order() -> None:
    part = GlobalOrder.part
    GlobalOrder.part = lambda self, epoch, begin, end: part(self, 0, begin, end)  # type: ignore[method-assign]


def every_rank_gets_the_same_samples() -> None:
    shares = GlobalOrder.shares
    GlobalOrder.shares = lambda self, indices, batching, rank: shares(self, indices, batching, 0)  # type: ignore[method-assign]


def the_last_batch_is_filled_up_from_the_start() -> None:
    def padded(self: GlobalOrder, start: Cursor, global_batch: int, epochs: int) -> Iterator[GlobalBatch]:
        for batch in _batches(self, start, global_batch, epochs):
            missing = global_batch - len(batch.indices)
            more = self.part(batch.epoch, 0, min(missing, self.samples))
            yield replace(batch, indices=torch.cat([torch.from_numpy(batch.indices), torch.from_numpy(more)]).numpy())

    GlobalOrder.batches = padded  # type: ignore[method-assign]


def the_last_batch_is_dropped() -> None:
    def dropping(self: GlobalOrder, start: Cursor, global_batch: int, epochs: int) -> Iterator[GlobalBatch]:
        return (each for each in _batches(self, start, global_batch, epochs) if len(each.indices) == global_batch)

    GlobalOrder.batches = dropping  # type: ignore[method-assign]


_batches = GlobalOrder.batches


# ---------------------------------------------------------------- what a checkpoint carries


def the_optimizer_state_is_not_loaded() -> None:
    set_state_dict = checkpoints.set_state_dict

    def forgetful(model: Any, optimizer: Any, *, model_state_dict: Any, optim_state_dict: Any) -> None:
        kept = {
            id(each): {key: value.clone() for key, value in values.items() if isinstance(value, torch.Tensor)}
            for each, values in optimizer.state.items()
        }
        set_state_dict(model, optimizer, model_state_dict=model_state_dict, optim_state_dict=optim_state_dict)
        for each, values in optimizer.state.items():
            for key, value in kept[id(each)].items():
                values[key] = torch.zeros_like(value)

    checkpoints.set_state_dict = forgetful


def the_schedule_starts_over() -> None:
    def slower(session: Session) -> None:
        schedule = session.parts.schedule
        session.parts.schedule = replace(schedule, options=schedule.options.model_copy(update={"warmup_steps": 50}))

    _after_resume(slower)


def the_cursor_is_not_loaded() -> None:
    _after_resume(lambda session: setattr(session.state, "cursor", Cursor()))


def _after_resume(action: Callable[[Session], None]) -> None:
    go_on_from = Session._go_on_from

    def forgetful(self: Session, loaded: RunState) -> None:
        go_on_from(self, loaded)
        action(self)

    Session._go_on_from = forgetful  # type: ignore[method-assign]


# ---------------------------------------------------------------- ranks that part


def one_rank_stops_early() -> None:
    batches = Session.batches

    def fewer(self: Session) -> Generator[StepBatch, None, None]:
        for number, batch in enumerate(batches(self)):
            if self.world.rank == 1 and number == 3:
                return
            yield batch

    Session.batches = fewer  # type: ignore[method-assign]


def one_rank_calls_another_collective() -> None:
    def more(self: Session) -> None:
        if self.world.rank == 1 and self.steps_done == 2:
            dist.all_reduce(torch.zeros(3))

    _before_step(more)


def one_rank_never_comes_back() -> None:
    def sleep(self: Session) -> None:
        if self.world.rank == 1 and self.steps_done == 2:
            time.sleep(3600)

    _before_step(sleep)


def one_rank_fails() -> None:
    def fail(self: Session) -> None:
        if self.world.rank == 1 and self.steps_done == 2:
            raise ValueError("the cause")

    _before_step(fail)


def _before_step(action: Any) -> None:
    take = Session.step

    def stepping(self: Session, batch: StepBatch) -> Any:
        action(self)
        return take(self, batch)

    Session.step = stepping  # type: ignore[method-assign]


def a_strategy_averages_weights_instead_of_gradients() -> None:
    """No bug: it says that it does not compute what one process would."""
    nothing_is_synchronised()

    def average(self: DistributedDataParallelStrategy) -> None:
        for parameter in self.module.parameters() if dist.is_initialized() else ():
            dist.all_reduce(parameter.data)
            parameter.data /= dist.get_world_size()

    def after_update(self: DistributedDataParallelStrategy, step: int) -> None:
        if step % 3 == 0:
            average(self)

    DistributedDataParallelStrategy.after_update = after_update  # type: ignore[method-assign, assignment]
    DistributedDataParallelStrategy.share_buffers = average  # type: ignore[method-assign, assignment]
    DistributedDataParallelStrategy.unequal = "each rank trains on its own gradients"


def nothing() -> None:
    """No bug at all: the same way through verify, which must pass."""
