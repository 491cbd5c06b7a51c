"""Session: the five verbs on which everything that trains is built.

with Session("chess.yaml") as session:      take this process's place among the ranks
    session.prepare()                       build the model once, spread it, make optimizer and data
    session.resume()                        go on from the last whole checkpoint, if there is one
    for batch in session.batches():         this rank's share of each global batch
        session.step(batch)                 one optimizer step
        if session.steps_done % 100 == 0:
            session.save()                  all ranks together; written while the next steps run
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from shardwise.checkpoint import CheckpointStore, Written
from shardwise.compat.quiet import quiet_pytorch
from shardwise.compat.tensors import tree_map_only
from shardwise.config import Batching, Config, load_config, resolve_learning_rate, with_batch_size
from shardwise.config.commands import to_start_anew
from shardwise.config.seeds import Purpose
from shardwise.data import BatchedSamples, Cursor, GlobalOrder, Reader, StepBatch, StepLoader
from shardwise.data.loader import MicroBatch
from shardwise.data.overlap import check_overlap
from shardwise.data.seeding import seed_everything
from shardwise.engine.batch_plan import BatchPlan, needs_group
from shardwise.engine.batch_size import find_batch_size
from shardwise.engine.build import build_parts
from shardwise.engine.checkpointing import Checkpoints, load_extra_state, refuse_another_run, rehearse
from shardwise.engine.evaluate import check_monitor, run_evaluation, unknown_monitor
from shardwise.engine.garbage import gc_frozen
from shardwise.engine.graphs import Graphs
from shardwise.engine.loss_check import LossCheck
from shardwise.engine.loss_guard import nonfinite_before
from shardwise.engine.observers import Data, Observer, Rehearsal, all_observers
from shardwise.engine.out_of_memory import memory_explained
from shardwise.engine.parallel_init import build_initial_model
from shardwise.engine.parts import Parts
from shardwise.engine.pending_step import PendingStep
from shardwise.engine.rollback import go_back, skipped_batch_step
from shardwise.engine.schedule import Schedule
from shardwise.engine.startup_timer import StartupTimer
from shardwise.engine.state import RunState, position_of
from shardwise.engine.step import run_step
from shardwise.engine.step_result import StepResult
from shardwise.engine.user_task import check_data, task_for
from shardwise.errors import ConfigError, ShardwiseError, StorageLost
from shardwise.parallel import Layout, Strategy, World
from shardwise.parallel.gather import Scope, gathering
from shardwise.parallel.membership import Member
from shardwise.parallel.what_runs import MACHINES_OWN, what_runs
from shardwise.tasks import Loss, Rows, Task
from shardwise.tasks.base import overridden_below
from shardwise.watch.heartbeats import Phase, beat
from shardwise.watch.run_key import run_key

log = logging.getLogger(__name__)


class Session:
    def __init__(
        self, config: Config | str | Path, *, elastic: bool = False, observers: Iterable[Observer] = ()
    ) -> None:
        """`elastic`: the number of ranks is whatever there is, and the global batch need not divide by it. `observers`: see
        engine/observers.py."""
        quiet_pytorch()
        self.startup = StartupTimer()
        self.observers = all_observers(observers)
        config = config if isinstance(config, Config) else load_config(config)
        for rehearsal in self._rehearsals:
            config = rehearsal.config(config)
        finds_batch_size = config.training.batch_size == "auto"
        self.config = with_batch_size(config, 1) if finds_batch_size else config  # until it is found
        patience = timedelta(seconds=max(1800.0, 2 * config.training.hang_timeout))  # the verdict comes first
        member = partial(_member, config, elastic)
        self.world = World.join(config.training.device, connect=needs_group(config), timeout=patience, member=member)
        try:
            self.plan = BatchPlan.of(self.config, self.world, elastic=elastic, finds_batch_size=finds_batch_size)
        except ShardwiseError:
            self.world.leave()
            raise
        self.state = RunState(seed=config.seed)
        self.resumed_from: RunState | None = None
        """As it was in the checkpoint that this session goes on from."""
        self.extra_state_lost = False
        """That checkpoint has none of the strategy's own state for this strategy and number of ranks."""
        self.stop_requested = False
        """Set on any rank, for example by a signal: all ranks leave together before the next step."""
        self.stop_check: Callable[[], bool] = lambda: False
        """Asked before every step and every batch of an evaluation: the same as `stop_requested`, found out when needed."""
        store = CheckpointStore(Path(config.checkpoint_folder))
        self.checkpoints = Checkpoints(store, self.world, config.training)
        self.checkpoints.on_written = self._written
        self._pending = PendingStep()
        self._went_back = self._said_of_monitor = False
        self._parts: Parts | None = None
        self._valid_loader: StepLoader | None = None
        self.startup.lap("rendezvous")

    # What follows from what it holds.

    @property
    def strategy(self) -> Strategy:
        return self.plan.strategy

    @property
    def layout(self) -> Layout:
        return self.plan.layout

    @property
    def batching(self) -> Batching:
        return self.plan.batching

    @property
    def steps_done(self) -> int:
        return self.state.step

    @property
    def cursor(self) -> Cursor:
        return self.state.cursor

    @property
    def skipped_steps(self) -> int:
        return self.state.skipped_steps

    @property
    def best_metric(self) -> float | None:
        return self.state.best_metric

    @property
    def parts(self) -> Parts:
        if self._parts is None:
            raise ShardwiseError("call session.prepare() first")
        return self._parts

    @property
    def model(self) -> nn.Module:
        return self.parts.strategy.model

    @property
    def _rehearsals(self) -> list[Rehearsal]:
        return [each for each in self.observers if isinstance(each, Rehearsal)]

    # ---------------------------------------------------------------- its end

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        self.checkpoints.give_up()
        # After an error, ending NCCL's group would wait for collectives that never come; the process is about to end.
        if self.world.device.type == "cpu":
            self._leave()

    def close(self) -> None:
        """Leave the ranks, when the last checkpoint is in place."""
        try:
            self._pending.wait()
            for observer in self.observers:
                observer.closing(self)
            self.wait()
        finally:
            self._leave()

    def _leave(self) -> None:
        self._valid_loader = None
        if self._parts is not None:
            self._parts.strategy.release()
        self.world.leave()

    # ---------------------------------------------------------------- prepare

    def prepare(
        self,
        task: Task | None = None,
        *,
        model: nn.Module | None = None,
        data: Any = None,
        loss: Callable[[nn.Module, Any], Loss] | None = None,
        valid: Any = None,
        collate: Callable[[list[Any]], Any] | None = None,
        count: Callable[[Any], int] | None = None,
        loss_is_a_sum: bool = True,
    ) -> nn.Module:
        """Make everything ready for the first step.

        With no argument, the config's task is trained. With `model`, `data` and `loss`, your own are: the model built
        on the CPU, a data set with a length, and a function from (model, batch) to a Loss. `loss_is_a_sum=False`: samples
        are meant to interact in it, as in a contrastive loss, and the first step does not ask whether it is a sum over them.
        """
        with self._memory_explained("while the run was prepared"):
            self.task = task_for(self.config, task, model, data, loss, valid, collate, count)
            given: Data | None = None
            for rehearsal in self._rehearsals:
                self.task, given = rehearsal.task(self, self.task)
            self.task.loss_is_a_sum = self.task.loss_is_a_sum and loss_is_a_sum
            self._prepare_data(given)
            self._parts = build_parts(self.config, self.task, self.plan, self._build, self._trial(), self.total_steps)
            if self.plan.finds_batch_size:
                self._find_batch_size()
            if (graphs := Graphs.of(self.parts, self.batching.accumulation)) is not None:
                self.observers.append(graphs)
            if self.task.loss_is_a_sum and all(each.checks_loss for each in self._rehearsals):
                self.observers.append(LossCheck())
            self.checkpoints.open(self.parts)
            self._know_what_run_it_is()
            self.startup.lap("model")
        for observer in self.observers:
            observer.prepared(self)
        return self.model

    def _prepare_data(self, given: Data | None) -> None:
        """`given`: where the data are there already."""
        beat(Phase.PREPARE, 0)
        seed_everything(self.config.seed, Purpose.DATA)  # the same on every rank, or they would make different data
        self.world.on_each_machine(self.task.prepare_data)
        self.train_data: Any
        self.valid_data: Any
        self.train_data, self.valid_data = given or (self.task.train_data(), self.task.valid_data())
        check_data(self.train_data, self.valid_data, self.world)
        if not self._rehearsals:  # they are about the ranks, and would tell it many times
            self.world.on_first(self._check_overlap)
        check_monitor(self.task, self.config.training)
        self.startup.lap("data")

    def _check_overlap(self) -> None:
        parts = self.train_data, self.valid_data
        other_data = overridden_below(self.task, "sample_contents", ("train_data", "valid_data"))
        contents = Task.sample_contents(self.task, *parts) if other_data else self.task.sample_contents(*parts)
        if contents is not None:
            check_overlap(contents, allowed=self.config.data.allow_shared_samples)

    def _build(self) -> nn.Module:
        self.startup.lap("model")
        model = build_initial_model(self.task, self.config.seed)
        self.startup.lap("weights")
        return model

    def _find_batch_size(self) -> None:
        regions = self.strategy.regions
        with regions.resting() if regions is not None else nullcontext():
            size, how = find_batch_size(self.parts, self.plan, self.train_data, self.order())
        self.config = self.task.config = self.parts.config = with_batch_size(self.config, size)
        self.plan.found_batch_size(self.config.training, how)
        lr = resolve_learning_rate(self.config.training, self.batching.global_batch)
        self.parts.schedule = Schedule(self.config.training.scheduler, lr, self.total_steps)

    def _trial(self) -> Callable[[nn.Module, torch.device], torch.Tensor]:
        """The loss of the first samples: for a look at what a model does, and how long its parts take."""
        inputs = cache(self.first_inputs)

        def trial(model: nn.Module, device: torch.device) -> torch.Tensor:
            moved = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), inputs())
            with gathering(Scope(self.layout, alone=True)):
                return self.task.loss(model, moved).sum

        return trial

    def _know_what_run_it_is(self) -> None:
        origin = self.train_data.origin if isinstance(self.train_data, BatchedSamples) else ""
        self.state.global_batch, self.state.samples = self.batching.global_batch, len(self.train_data)
        self.state.seed, self.state.order = self.config.seed, f"{origin} {self.order().name}".strip()
        self.state.labels = self.task.labels()

    def _memory_explained(self, doing: str) -> AbstractContextManager[None]:
        return memory_explained(doing, self.plan, lambda: self._parts)

    # ---------------------------------------------------------------- step

    @property
    def steps_per_epoch(self) -> int:
        return self.batching.steps_per_epoch(len(self.train_data))

    @property
    def total_steps(self) -> int:
        """Of the whole run: those before this session, and those left from where it started."""
        training, begun = self.config.training, self.resumed_from or RunState()
        step, cursor = begun.step, begun.cursor
        epochs_after = max(0, training.max_epochs - cursor.epoch - 1)
        in_this_epoch = self.batching.steps_per_epoch(len(self.train_data) - cursor.consumed)
        left = in_this_epoch + epochs_after * self.steps_per_epoch if cursor.epoch < training.max_epochs else 0
        return min(step + left, training.max_steps or step + left)

    def batches(self) -> Generator[StepBatch]:
        """This rank's share of each global batch, from the cursor to the end of the run."""
        for rehearsal in self._rehearsals:
            rehearsal.before_first_batch(self)
        if self.resumed_from is not None and self.steps_done >= self.total_steps:
            self._say_that_it_is_finished(self.resumed_from.step)
        with gc_frozen():
            while self.steps_done < self.total_steps:
                self._went_back = False
                loader = self._loader()
                beat(Phase.DATA, self.steps_done + 1)
                for batch in loader:
                    yield batch
                    if self.steps_done >= self.total_steps:
                        return
                    if self._went_back:  # the batches that follow are others now
                        break
                    beat(Phase.DATA, self.steps_done + 1)
                else:
                    return

    def _say_that_it_is_finished(self, resumed_at: int) -> None:
        """A loop that is begun again after its last step, which would end without a word."""
        if self.steps_done > resumed_at or not self.world.is_first:
            return
        training = self.config.training
        steps = "" if training.max_steps is None else f" and training.max_steps (now {training.max_steps})"
        log.warning(
            f"nothing is left to do: all {self.steps_done} steps of this run are made. A larger training.max_epochs "
            f"(now {training.max_epochs}){steps} makes it go on. {to_start_anew(self.checkpoints.store.folder)}"
        )

    def first_inputs(self) -> Any:
        """Of this rank's next micro-batch: for a look at what the model does. Read as the loop reads, so that files are opened
        by the loader's workers alone."""
        return next(iter(self._loader())).micro[0].inputs

    def _loader(self) -> StepLoader:
        return StepLoader(
            Reader(self.train_data, self.task.collate, self.task.count, self.config.seed),
            self.order(),
            self.plan.per_process,
            self.layout.data_rank,
            self.world.device,
            self.config.data,
            start=self.cursor,
            epochs=self.config.training.max_epochs,
        )

    def order(self) -> GlobalOrder:
        """Which samples make up which step, in every epoch."""
        data, seed = self.train_data, self.config.seed
        order = data.order(seed) if isinstance(data, BatchedSamples) else GlobalOrder(len(data), seed)
        for rehearsal in self._rehearsals:
            order = rehearsal.order(order)
        return order

    def _valid_order(self, samples: int) -> GlobalOrder:
        order = GlobalOrder(samples, self.config.seed, shuffle=False)
        for rehearsal in self._rehearsals:
            order = rehearsal.valid_order(order)
        return order

    def step(self, batch: StepBatch) -> StepResult:
        """One optimizer step. After a `stopped` one, leave the loop: every rank does."""
        with self._memory_explained(f"step {self.steps_done + 1}"):
            self.checkpoints.poll()
            for observer in self.observers:
                observer.before_step(self, batch)
            result = self._step(batch)
            for observer in self.observers:
                observer.after_step(self, batch, result)
            return result

    def _step(self, batch: StepBatch) -> StepResult:
        if position_of(batch, len(self.train_data)) in self.state.skipped_batches:
            return self._made(skipped_batch_step(self.parts, batch, self.steps_done), batch)
        try:
            result = run_step(
                self.parts,
                batch,
                self.steps_done,
                stop=self._stopping(),
                bad=self._pending.bad_loss,
                losses=self.state.recent_losses,
                gradients_ready=self._gradients_ready,
            )
        except Exception as error:
            for observer in self.observers:
                observer.step_failed(self, error)
            raise
        self._pending.wait()  # for the step before, which a GPU has made meanwhile
        if result.stopped:
            return result
        if result.rollback:
            go_back(self, batch, result)
            self._went_back = True
            return result
        self._pending.follow(result)
        if result.loss is not None and not result.skipped:
            self.state.recent_losses.add(result.loss)
        return self._made(result, batch)

    def _gradients_ready(self) -> None:
        for observer in self.observers:
            observer.gradients_ready(self)

    def _made(self, result: StepResult, batch: StepBatch) -> StepResult:
        self.state.step_made(batch, skipped=result.skipped)
        self.checkpoints.step_made()
        return result

    def _stopping(self) -> bool:
        return self.stop_requested or self.stop_check()

    def loss(self, *results: StepResult) -> float:
        """The true loss of these steps: all ranks' sums over all ranks' counts. All ranks call it together."""
        total, count = self.world.sum(sum(r.loss_sum for r in results), sum(r.count for r in results))
        return total / count if count else math.nan

    # ---------------------------------------------------------------- evaluate

    def evaluate(self) -> dict[str, float] | None:
        """Metrics on the validation data; empty if the task has none. All ranks call it together.

        None: a rank was asked to stop in the middle of it, and all gave it up.
        """
        if self.valid_data is None or not len(self.valid_data):
            return {}
        with self._memory_explained(f"evaluation after step {self.steps_done}"), self.strategy.one_model():
            pictures = Path(self.config.run_folder) / "pictures"
            metrics = run_evaluation(
                self.parts,
                self._valid_batches(self.valid_data),
                pictures,
                self.steps_done,
                stop=self._stopping,
                seen=self._batch_evaluated,
            )
        if metrics is not None:
            self._look_for_monitor(metrics)
        for observer in self.observers if metrics is not None else ():
            observer.evaluated(self, metrics or {})
        return metrics

    def _batch_evaluated(self, micro: MicroBatch, results: Mapping[str, Loss | Rows]) -> None:
        for observer in self.observers:
            observer.batch_evaluated(self, micro, results)

    def _look_for_monitor(self, metrics: dict[str, float]) -> None:
        """Before the first step a wrong name ends the run. After it, what was trained by then must not be lost for a name."""
        unknown = unknown_monitor(self.config.training.monitor, metrics)
        if unknown is not None and not self.steps_done:
            raise ConfigError(unknown)
        if unknown is not None and not self._said_of_monitor and self.world.is_first:
            log.warning(f"{unknown}. Training goes on; while there is none, no checkpoint counts as the best")
        self._said_of_monitor |= unknown is not None

    def _valid_batches(self, data: Any) -> StepLoader:
        if self._valid_loader is None:
            # Its workers stay until the end: to fork again in the middle of a run takes time, and a fork while another
            # thread starts or ends may hang (Python 3.11).
            self._valid_loader = StepLoader(
                Reader(data, self.task.collate, lambda _: 0, self.config.seed, name="validation"),
                self._valid_order(len(data)),
                replace(self.plan.per_process, accumulation=1, kept=None),
                self.layout.data_rank,
                self.world.device,
                self.config.data,
                keep_workers=True,
            )
        return self._valid_loader

    # ---------------------------------------------------------------- save and resume

    def save(self, metrics: dict[str, float] | None = None) -> Path:
        """Write a checkpoint of this step: whole and in place, or not there at all. All ranks call it together.

        It is written while training goes on, unless training.async_checkpoint is false; `wait()` waits for it.
        """
        beat(Phase.SAVE, self.steps_done)
        training = self.config.training
        self._pending.wait()
        if self._pending.broken is not None:
            raise self._pending.broken
        if training.on_nonfinite == "stop" and self.world.sum(self._pending.bad_loss is not None)[0]:
            raise nonfinite_before(self.parts, self.steps_done, self._pending.bad_loss)
        self.state.evaluated((metrics or {}).get(training.monitor), training.monitor_mode)
        self.state.scaler = self.parts.scaler.state_dict()
        with self.strategy.one_model(moments=True):
            return self.checkpoints.save(self.parts, self.state)

    def wait(self) -> None:
        """Until the newest checkpoint is in place. If it could not be written, this says why."""
        written = self.checkpoints.poll(wait=True)
        if written and written[-1].cause is not None:
            raise written[-1].cause

    def resume(self, which: str = "auto") -> Path | None:
        """Go on from a checkpoint: `auto` (the newest whole one, if any), `latest` (there must be one), or a path."""
        beat(Phase.RESUME, 0)
        found = self.checkpoints.load(self.parts, which, self.state.labels)
        if found is None:
            return None
        path, loaded = found
        if self.strategy.needs_rehearsal and not self.steps_done:
            rehearse(self.parts, self.first_inputs())
        self.extra_state_lost = not load_extra_state(self.parts, path)
        refuse_another_run(loaded, self.state)
        self.checkpoints.go_on(path, loaded.step)
        self._go_on_from(loaded)
        for observer in self.observers:
            observer.resumed(self, path)
        return path

    def _go_on_from(self, loaded: RunState) -> None:
        self._pending.forget()
        self.state, self.resumed_from = loaded, replace(loaded)
        self._know_what_run_it_is()
        self.parts.schedule = replace(self.parts.schedule, run_steps=self.total_steps)
        if loaded.scaler and self.parts.scaler.is_enabled():
            self.parts.scaler.load_state_dict(loaded.scaler)

    def _written(self, written: Written) -> None:
        lost = isinstance(written.cause, StorageLost)  # that ends the run
        if written.problem and not lost and self.world.is_first:
            log.warning(f"{written.problem}; training goes on, earlier checkpoints are still there")
        for observer in self.observers:
            observer.saved(self, written)


def _member(config: Config, elastic: bool, device: torch.device) -> Member:
    """What several ranks compare before anything else."""
    own = MACHINES_OWN if elastic else frozenset()
    return Member(run_key(Path(config.run_folder)), what_runs(config, device.type, own))
