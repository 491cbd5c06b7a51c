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

import math
from collections.abc import Callable, Generator
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from shardwise.checkpoint import CheckpointStore
from shardwise.config import Batching, Config, load_config, resolve_learning_rate, with_batch_size
from shardwise.config.seeds import Purpose
from shardwise.data import BatchedSamples, Cursor, GlobalOrder, Reader, StepBatch, StepLoader
from shardwise.data.seeding import seed_everything
from shardwise.engine.batch_plan import BatchPlan, needs_group
from shardwise.engine.batch_size import find_batch_size
from shardwise.engine.checkpointing import Checkpoints, resume_run, save_run
from shardwise.engine.evaluate import run_evaluation
from shardwise.engine.garbage import garbage_kept_small
from shardwise.engine.graphs import Graphs
from shardwise.engine.loss_guard import BadLoss, LossHistory
from shardwise.engine.optimizer import build_optimizer
from shardwise.engine.out_of_memory import memory_explained
from shardwise.engine.parallel_init import build_initial_model
from shardwise.engine.precision import Precision
from shardwise.engine.rollback import SkippedBatches, go_back, position_of, skipped_batch_step
from shardwise.engine.schedule import Schedule
from shardwise.engine.startup_timer import StartupTimer
from shardwise.engine.step import Parts, StepResult, run_step
from shardwise.engine.user_task import check_data, task_for
from shardwise.errors import ShardwiseError
from shardwise.kernels.low_precision_adamw import LowPrecisionAdamW
from shardwise.parallel import Layout, World, parallelize
from shardwise.tasks import Loss, Task
from shardwise.watch.heartbeats import Phase, beat

COMPILING_PAYS_AFTER = 200
"""Steps of a run from which on its blocks are compiled by default."""


class Session:
    def __init__(self, config: Config | str | Path, *, elastic: bool = False) -> None:
        """`elastic`: the number of ranks is whatever there is, and the global batch need not divide by it."""
        self.startup = StartupTimer()
        self.config = config if isinstance(config, Config) else load_config(config)
        self.finds_batch = self.config.training.batch_size == "auto"
        self.batch_found = ""
        """How the batch size was found, where it was looked for."""
        if self.finds_batch:
            self.config = with_batch_size(self.config, 1)  # until it is found
        patience = timedelta(seconds=max(1800.0, 2 * self.config.training.hang_timeout))  # the verdict comes first
        self.world = World.join(self.config.training.device, connect=needs_group(self.config), timeout=patience)
        try:
            self.place = BatchPlan.of(self.config, self.world, elastic=elastic, finds_batch=self.finds_batch)
        except ShardwiseError:
            self.world.leave()
            raise
        self.store = CheckpointStore(Path(self.config.checkpoint_folder))
        self.cursor = Cursor()
        self.steps_done = 0
        self.skipped_steps = 0
        self.best_metric: float | None = None
        self.stop_requested = False
        """Set on any rank, for example by a signal: all ranks leave together before the next step."""
        self.stop_check: Callable[[], bool] = lambda: False
        """Asked before every step and every batch of an evaluation: the same as `stop_requested`, found out when needed."""
        self.checkpoints = Checkpoints(self.store, self.world, self.config.training)
        self.forgot_compression = False
        """The checkpoint that was resumed has no memory of powersgd for this number of ranks."""
        self.batch_before: int | None = None
        """The global batch of the checkpoint that was resumed."""
        self.begun_at: tuple[int, Cursor] = (0, Cursor())
        """The step and the cursor that this session started from."""
        self.skipped_batches: SkippedBatches = []
        """Global batches that rollbacks leave out: (epoch, samples consumed before it)."""
        self.recent_losses = LossHistory()
        self._went_back = False
        self.bad_loss: BadLoss | None = None
        self.broken: ShardwiseError | None = None
        """Why the last steps do not count: nothing may be saved of them."""
        self._pending_result: StepResult | None = None
        """The last step, where a GPU may still be making it."""
        self._parts: Parts | None = None
        self.graphs: Graphs | None = None
        """Where blocks may be recorded as CUDA graphs."""
        self._valid_loader: StepLoader | None = None
        self.startup.lap("meeting")

    @property
    def strategy(self) -> str:
        return self.place.strategy

    @property
    def layout(self) -> Layout:
        return self.place.layout

    @property
    def batching(self) -> Batching:
        return self.place.batching

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
            self.settle()
            self.wait()
        finally:
            self._leave()

    def _leave(self) -> None:
        self._valid_loader = None
        if self._parts is not None:
            self._parts.spread.release()
        self.world.leave()

    # ---------------------------------------------------------------- prepare

    @memory_explained(lambda session: "while the run was prepared")
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
    ) -> nn.Module:
        """Make everything ready for the first step.

        With no argument, the config's task is trained. With `model`, `data` and `loss`, your own are: the model built
        on the CPU, a data set with a length, and a function from (model, batch) to a Loss.
        """
        self.task = task = task_for(self.config, task, model, data, loss, valid, collate, count)
        beat(Phase.PREPARE, 0)
        seed_everything(self.config.seed, Purpose.DATA)  # the same on every rank, or they would make different data
        self.world.on_each_machine(task.prepare_data)
        self.train_data = task.train_data()
        self.valid_data = task.valid_data()
        check_data(self.train_data, self.valid_data, self.world)
        self.startup.lap("data")
        training = self.config.training
        spread_model = parallelize(
            self._build,
            task.blocks,
            task.tensor_plan,
            self.strategy,
            training,
            self.layout,
            self.batching.accumulation,
            self._trial(),
            find_regions=task.regions if self._compiles() else None,
            one_size=task.one_size,
            narrows=task.narrow_weights if training.narrow_weights == "auto" else training.narrow_weights,
        )
        lr = resolve_learning_rate(training, self.batching.global_batch)
        precision = Precision(training.precision, self.world.device.type)
        precision.settle()
        scaler = precision.scaler()
        self._parts = Parts(
            config=self.config,
            task=task,
            world=self.world,
            spread=spread_model,
            optimizer=build_optimizer(
                spread_model.module,
                training.optimizer,
                lr,
                sharded=self.strategy == "zero1" and self.world.size > 1,
                narrow=spread_model.narrow if spread_model.regions is not None and not scaler.is_enabled() else None,
            ),
            schedule=Schedule(training.scheduler, lr, self.total_steps),
            precision=precision,
            scaler=scaler,
        )
        spread_model.updates_from_copies = isinstance(self._parts.optimizer, LowPrecisionAdamW)
        spread_model.model.train()
        if self.finds_batch:
            self._find_batch()
        self.graphs = Graphs.of(self._parts, self.strategy, self.batching.accumulation)
        # Ranks that hold the same tensors write a part of them each.
        copies = self.layout.data_size // self.layout.size("shard")
        self.checkpoints.open(spread_model.module.parameters(), copies)
        self.startup.lap("model")
        return spread_model.model

    def _build(self) -> nn.Module:
        self.startup.lap("model")
        model = build_initial_model(self.task, self.config.seed)
        self.startup.lap("weights")
        return model

    def _compiles(self) -> bool:
        """Whether the model's blocks are compiled. It follows from the config alone, so that a resumed run does the same."""
        wanted = self.config.training.compile
        if wanted == "auto":
            proven = self.world.device.type == "cuda" and self.strategy in ("single", "ddp", "zero1", "fsdp")
            return proven and self.total_steps >= COMPILING_PAYS_AFTER
        return wanted

    def _find_batch(self) -> None:
        regions = self.parts.spread.regions
        with regions.resting() if regions is not None else nullcontext():
            size, self.batch_found = find_batch_size(self)
        self.config = self.task.config = self.parts.config = with_batch_size(self.config, size)
        self.finds_batch = False
        self.place.found_batch(self.config.training)
        lr = resolve_learning_rate(self.config.training, self.batching.global_batch)
        self.parts.schedule = Schedule(self.config.training.scheduler, lr, self.total_steps)

    def _trial(self) -> Callable[[nn.Module, torch.device], torch.Tensor]:
        """The loss of the first samples: for a look at what a model does, and how long its parts take."""
        inputs = cache(self.first_inputs)

        def trial(model: nn.Module, device: torch.device) -> torch.Tensor:
            return self.task.loss(model, tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), inputs())).sum

        return trial

    @property
    def parts(self) -> Parts:
        if self._parts is None:
            raise ShardwiseError("call session.prepare() first")
        return self._parts

    @property
    def model(self) -> nn.Module:
        return self.parts.spread.model

    # ---------------------------------------------------------------- step

    @property
    def steps_per_epoch(self) -> int:
        return self.batching.steps_per_epoch(len(self.train_data))

    @property
    def total_steps(self) -> int:
        """Of the whole run: those before this session, and those left from where it started."""
        training, (step, cursor) = self.config.training, self.begun_at
        epochs_after = max(0, training.max_epochs - cursor.epoch - 1)
        in_this_epoch = self.batching.steps_per_epoch(len(self.train_data) - cursor.consumed)
        left = in_this_epoch + epochs_after * self.steps_per_epoch if cursor.epoch < training.max_epochs else 0
        return min(step + left, training.max_steps or step + left)

    def batches(self) -> Generator[StepBatch]:
        """This rank's share of each global batch, from the cursor to the end of the run."""
        with garbage_kept_small():
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

    def first_inputs(self) -> Any:
        """Of this rank's next micro-batch: for a look at what the model does. Read as the loop reads, so that files are opened
        by the loader's workers alone."""
        return next(iter(self._loader())).micro[0].inputs

    def _loader(self) -> StepLoader:
        return StepLoader(
            Reader(self.train_data, self.task.collate, self.task.count, self.config.seed),
            self.order(),
            self.place.per_process,
            self.layout.data_rank,
            self.world.device,
            self.config.data,
            start=self.cursor,
            epochs=self.config.training.max_epochs,
        )

    def order(self) -> GlobalOrder:
        """Which samples make up which step, in every epoch."""
        data, seed = self.train_data, self.config.seed
        return data.order(seed) if isinstance(data, BatchedSamples) else GlobalOrder(len(data), seed)

    @memory_explained(lambda session: f"step {session.steps_done + 1}")
    def step(self, batch: StepBatch) -> StepResult:
        """One optimizer step. After a `stopped` one, leave the loop: every rank does."""
        self.checkpoints.poll()
        if position_of(batch, len(self.train_data)) in self.skipped_batches:
            return self._made(skipped_batch_step(self.parts, batch, self.steps_done), batch)
        with self.graphs.recording(self.steps_done + 1) if self.graphs is not None else nullcontext():
            result = run_step(
                self.parts, batch, self.steps_done, stop=self._stopping(), bad=self.bad_loss, losses=self.recent_losses
            )
        self.settle()  # the step before, which a GPU has made meanwhile
        if result.stopped:
            return result
        if result.rollback:
            go_back(self, batch, result)
            self._went_back = True
            return result
        self._pending_result = result
        if result.awaited is None:
            self.settle()
        if result.loss is not None and not result.skipped:
            self.recent_losses.add(result.loss)
        return self._made(result, batch)

    def settle(self) -> None:
        """Until the device has made the last step; if its numbers are bad, this says so. All ranks call it together."""
        if self._pending_result is not None:
            ahead, self._pending_result = self._pending_result, None
            unasked = ahead.awaited is not None  # whoever has asked for its numbers made the host wait for the device
            try:
                self.bad_loss = ahead.settle().bad_loss
                if self.graphs is not None and unasked:
                    self.graphs.watch(ahead, self.total_steps - self.steps_done)
            except ShardwiseError as error:
                self.broken = error
                raise

    def forget_pending_result(self) -> None:
        """The run goes on from elsewhere: what became of the last step does not matter any more."""
        self._pending_result = self.broken = None

    def _made(self, result: StepResult, batch: StepBatch) -> StepResult:
        self.steps_done += 1
        self.skipped_steps += result.skipped
        self.cursor = batch.after
        self.checkpoints.step_made()
        return result

    def _stopping(self) -> bool:
        return self.stop_requested or self.stop_check()

    def loss(self, *results: StepResult) -> float:
        """The true loss of these steps: all ranks' sums over all ranks' counts. All ranks call it together."""
        total, count = self.world.sum(sum(r.loss_sum for r in results), sum(r.count for r in results))
        return total / count if count else math.nan

    # ---------------------------------------------------------------- evaluate

    @memory_explained(lambda session: f"evaluation after step {session.steps_done}")
    def evaluate(self) -> dict[str, float] | None:
        """Metrics on the validation data; empty if the task has none. All ranks call it together.

        None: a rank was asked to stop in the middle of it, and all gave it up.
        """
        if self.valid_data is None or not len(self.valid_data):
            return {}
        if self._valid_loader is None:
            # Its workers stay until the end: to fork again in the middle of a run takes time, and a fork while another
            # thread starts or ends may hang (Python 3.11).
            self._valid_loader = StepLoader(
                Reader(self.valid_data, self.task.collate, lambda _: 0, self.config.seed, name="validation"),
                GlobalOrder(len(self.valid_data), self.config.seed, shuffle=False),
                replace(self.place.per_process, accumulation=1, kept=None),
                self.layout.data_rank,
                self.world.device,
                self.config.data,
                keep_workers=True,
            )
        self.parts.spread.share_buffers()
        pictures = Path(self.config.run_folder) / "pictures"
        return run_evaluation(self.parts, self._valid_loader, pictures, self.steps_done, stop=self._stopping)

    # ---------------------------------------------------------------- save and resume

    def save(self, metrics: dict[str, float] | None = None) -> Path:
        """Write a checkpoint of this step: whole and in place, or not there at all. All ranks call it together.

        It is written while training goes on, unless training.async_checkpoint is false; `wait()` waits for it.
        """
        return save_run(self, metrics)

    def wait(self) -> None:
        """Until the newest checkpoint is in place. If it could not be written, this says why."""
        written = self.checkpoints.poll(wait=True)
        if written and written[-1].cause is not None:
            raise written[-1].cause

    def resume(self, which: str = "auto") -> Path | None:
        """Go on from a checkpoint: `auto` (the newest whole one, if any), `latest` (there must be one), or a path."""
        return resume_run(self, which)
