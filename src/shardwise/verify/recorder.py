"""What is written down of one run of the proof: every step, the gradients of the first, the weights after the last.

An observer, so that a program with a loop of its own is recorded like any other.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.config import Config
from shardwise.data import Cursor, GlobalOrder, StepBatch
from shardwise.data.loader import MicroBatch
from shardwise.engine.observers import Data, Rehearsal
from shardwise.engine.run import Run
from shardwise.engine.step_result import StepResult
from shardwise.tasks import Task
from shardwise.verify.contents import contents_of, digest, digests, local, whole
from shardwise.verify.dropout import switch_off_in
from shardwise.verify.evaluation import Evaluation
from shardwise.verify.measure import rounding_of
from shardwise.verify.names import canonical, tied_names
from shardwise.verify.own_data import look_at_own
from shardwise.verify.own_gradients import OwnGradients
from shardwise.verify.run_spec import RunSpec, config_for, in_precision
from shardwise.verify.shared_data import make_shared, take_shared
from shardwise.verify.window import Window

WHOLE_ON_EVERY_RANK = 30_000_000
"""Elements of a model up to which every rank writes its tensors down; above, rank 0 does, and the others fingerprints."""
_SAME_ON_ANY_RANKS = ("max_epochs", "max_steps", "optimizer", "scheduler", "lr_scaling")
"""Keys of the block `training` that decide what is trained, however many ranks do it."""
Look = Callable[[Run, Config, RunSpec], Any]
"""(run, config as the user wrote it, spec) → what there is to know before the first step."""


class Finished(Exception):
    """What this process was started for has been done."""


class Recorder(Rehearsal):
    def __init__(self, spec: RunSpec, rank: int, look: Look | None = None) -> None:
        """`look`: all that this run is for; it makes no step."""
        self.spec, self.rank, self.look = spec, rank, look
        self.run: Run | None = None
        self.asked: Config | None = None
        self._evaluation: Evaluation | None = None
        first_step = ("inputs", "gradients", "gradient_digests", "own_gradients", "buffers")
        self.record: dict[str, Any] = {
            "snapshots": {},
            "weights_by_step": {},
            "gradients_by_step": {},
            "own_saves": [],
            **{key: {} for key in first_step},
        }
        self._own_gradients: OwnGradients | None = None
        self._as_they_were: list[tuple[nn.Parameter, Tensor]] = []
        self._done = False

    # ---------------------------------------------------------------- what is trained

    def config(self, config: Config) -> Config:
        self.asked = config = in_precision(config, self.spec.precision)
        training = config.training.model_dump(mode="json")
        self.record["asked"] = {key: training[key] for key in _SAME_ON_ANY_RANKS}
        return config_for(config, self.spec)

    def task(self, run: Run, task: Task) -> tuple[Task, Data | None]:
        if self.spec.kind == "data":
            self.run = run
            interpreter = self.spec.interpreters[self.rank]
            self.record["data"] = look_at_own(run, task, interpreter.wait, interpreter.order)
            self._write()
            raise Finished
        if self.spec.shared is None or self.spec.values is None:  # a program has made its data already
            return task, None
        make = self.spec.kind == "probe"
        return make_shared(run, task, self.spec.shared) if make else take_shared(task, self.spec.shared)

    def order(self, order: GlobalOrder) -> GlobalOrder:
        plan = self.spec.plan
        if plan is None or self.spec.kind == "coverage":
            return order
        of_ranks = plan.batching if self.spec.batches == "shares" else None
        return Window(order, plan.window, of_ranks=of_ranks, reorder=self.spec.reorder)

    def valid_order(self, order: GlobalOrder) -> GlobalOrder:
        if not self.spec.valid_samples:
            return order
        return GlobalOrder(min(order.samples, self.spec.valid_samples), order.seed, shuffle=False)

    # ---------------------------------------------------------------- before the first step

    def prepared(self, run: Run) -> None:
        self.run, module = run, run.strategy.module
        switch_off_in(run.model)
        if self.spec.plan is not None:
            run.state.cursor = Cursor(0, self.spec.plan.start)
        self.record |= {
            "strategy": run.strategy.name,
            "unequal": run.strategy.unequal,
            "tied": tied_names(module),
            "constants": digests(whole(module.named_buffers())),  # none has changed yet
        }
        if self.spec.watched and _elements(module) <= WHOLE_ON_EVERY_RANK:
            self._own_gradients = OwnGradients(module)

    def before_first_batch(self, run: Run) -> None:
        weights = whole(run.strategy.module.named_parameters())  # a program may have loaded its own
        self.record |= {
            "initial": digests(weights),
            "initial_weights": self._kept(weights),
            "watching": _numbers_of(run),
        }
        if self.look is not None:
            assert self.asked is not None
            self.record[self.spec.kind] = self.look(run, self.asked, self.spec)
            self._write()
            raise Finished
        if self.spec.resume:
            self.record["resumed_itself"] = run.checkpoints.saved_at is not None
            if not self.record["resumed_itself"]:  # what follows is proved all the same
                run.resume("latest")
            self._snapshot(run, "begins")

    def resumed(self, run: Run, path: Path) -> None:
        self._snapshot(run, "resumed")

    # ---------------------------------------------------------------- steps

    def before_step(self, run: Run, batch: StepBatch) -> None:
        if run.checkpoints.saved_at not in (None, self.spec.save_at, *self.record["own_saves"]):
            self.record["own_saves"].append(run.checkpoints.saved_at)
        if self.spec.keep_every_step and run.steps_done:
            if run.checkpoints.saved_at != run.steps_done:
                run.save()
            run.wait()
        if self.spec.follow is not None and run.steps_done:
            self._follow(run, self.spec.follow)
        if self.spec.reorder is not None:
            self._change_last_digits(run)
        if run.steps_done == self.spec.evaluate_at:
            self._evaluation = Evaluation(run, self.spec.valid_samples)
            alone = not self._each_step
            self.record["evaluation"] = self._evaluation.look(thorough=alone, regroup=self.spec.keep_every_step)
            self._evaluation = None
        if run.steps_done == 0:  # what it trains on, by samples: to be compared with what another process read
            self.record["inputs"] = {
                tuple(micro.request.ids.tolist()): contents_of(micro.inputs) for micro in batch.micro
            }

    def _follow(self, run: Run, folder: Path) -> None:
        """Weights, moments and running buffers of the other run, as they were before this step."""
        path = folder / "checkpoints" / f"step-{run.steps_done:08d}"
        found = run.checkpoints.load(run.parts, str(path), run.state.labels)
        scale = found[1].scaler if found else None
        if scale and run.parts.scaler.is_enabled():
            run.parts.scaler.load_state_dict(scale)

    def _change_last_digits(self, run: Run) -> None:
        """Every weight off by a rounding error in this step: what any other order of additions may do to a result."""
        eps = rounding_of(run.config.training.precision)
        generator = torch.Generator().manual_seed(1000 * (self.spec.reorder or 0) + run.steps_done)
        with torch.no_grad():
            for parameter in run.parts.parameters:
                self._as_they_were.append((parameter, parameter.detach().clone()))
                noise = 2 * torch.rand(parameter.shape, generator=generator).to(parameter.device) - 1
                parameter.mul_(1 + noise * eps)

    def gradients_ready(self, run: Run) -> None:
        with torch.no_grad():
            for parameter, value in self._as_they_were:
                parameter.copy_(value)
        self._as_they_were.clear()
        if self.spec.kill_at == run.steps_done + 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if run.steps_done == 0 or self._each_step:
            found = ((name, run.strategy.gradient_of(each)) for name, each in run.strategy.module.named_parameters())
            gradients = whole((name, gradient) for name, gradient in found if gradient is not None)
            if self._each_step:
                self.record["gradients_by_step"][run.steps_done + 1] = self._kept(gradients)
            if run.steps_done:
                return
            self.record |= {"gradients": self._kept(gradients), "gradient_digests": digests(gradients)}
            if self._own_gradients is not None:
                self.record["own_gradients"] = self._own_gradients.stop(run.parts.scaler.get_scale())

    @property
    def _each_step(self) -> bool:
        return self.spec.keep_every_step or self.spec.follow is not None

    def after_step(self, run: Run, batch: StepBatch, result: StepResult) -> None:
        row = {
            "step": result.step,
            "loss": run.loss(result),
            "grad_norm": result.grad_norm,
            "lr": result.lr,
            # Ranks of a pipeline, or that share every matrix, work on the same samples: one speaks for all.
            "ids": batch.ids if run.layout.counts else [],
            "global_count": result.global_count,
            "skipped": result.skipped,
            "stopped": result.stopped,
            "epoch": batch.epoch,
        }
        with self.spec.steps_file(self.rank).open("a") as file:
            file.write(json.dumps(row) + "\n")
        if result.step == 1:  # the ranks have different samples in it, and nobody has saved yet
            self.record["buffers"] = digests(_local_parts(run.strategy.module.named_buffers()))
            if result.skipped:
                self.record |= {"gradients": {}, "gradient_digests": {}}
        few = _elements(run.strategy.module) * self.spec.steps <= WHOLE_ON_EVERY_RANK
        if not result.stopped and (few or self._each_step):
            weights = whole(run.strategy.module.named_parameters())
            self.record["weights_by_step"][result.step] = self._kept(weights)
        if self.spec.values is None:  # a program may save after any step
            self._snapshot(run, f"step {run.steps_done}")
        if run.steps_done == self.spec.save_at and not result.stopped:
            run.save()
            run.wait()
            self._snapshot(run, "saved")

    def batch_evaluated(self, run: Run, micro: MicroBatch, results: Mapping[str, Any]) -> None:
        if self._evaluation is not None:
            self._evaluation.add(micro, results)

    def _snapshot(self, run: Run, when: str) -> None:
        """What a checkpoint must carry, as this rank holds it."""
        module = run.strategy.module
        names = {id(each): canonical(name) for name, each in module.named_parameters()}
        self.record["snapshots"][when] = {
            "weights": digests(_local_parts(module.named_parameters())),
            "buffers": digests(_local_parts(_running(module))),
            "optimizer": {
                f"{names.get(id(each), '?')} {key}": digest(local(value))
                for each, values in run.parts.optimizer.state.items()
                for key, value in values.items()
                if isinstance(value, Tensor)
            },
            "steps_done": run.steps_done,
            "cursor": asdict(run.state.cursor),
            "next_lr": run.parts.schedule.rate(run.steps_done),
            "scaler": run.parts.scaler.state_dict(),
            "watching": _numbers_of(run),
        }

    # ---------------------------------------------------------------- its end

    def closing(self, run: Run) -> None:
        if sys.exc_info()[0] is None:
            self.finish()

    def finish(self) -> None:
        """After the last step, while the ranks are together. Again, for a program that closes nothing."""
        if self._done or self.run is None:
            return
        weights = whole(self.run.strategy.module.named_parameters())
        self._snapshot(self.run, "end")
        self.record |= {"weights": self._kept(weights), "weight_digests": digests(weights)}
        if self.spec.evaluate_last and self.run.valid_data is not None and len(self.run.valid_data):
            with suppress(Exception):  # what fails in it is told of the other evaluations
                self.record["last_metrics"] = self.run.evaluate()
        self._write()

    def _write(self) -> None:
        self._done = True
        torch.save(self.record, self.spec.record(self.rank))

    def _kept(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        small = sum(each.numel() for each in tensors.values()) <= WHOLE_ON_EVERY_RANK
        return tensors if self.rank == 0 or small else {}


def _elements(module: nn.Module) -> int:
    return sum(each.numel() for each in module.parameters())


def _local_parts(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {canonical(name): local(each.detach()) for name, each in named}


def _numbers_of(run: Run) -> dict[str, str]:
    """What the observers of a program hold: numbers in their attributes, by name."""
    own = [each for each in run.observers if type(each).__module__.partition(".")[0] != "shardwise"]
    return {
        f"{type(each).__name__}.{key}": repr(value)
        for each in own
        for key, value in vars(each).items()
        if isinstance(value, int | float | None)
    }


def _running(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers that training changes, such as running statistics: those in the state dict."""
    kept = set(module.state_dict())
    return ((name, each) for name, each in module.named_buffers() if name in kept)
