"""Watches a Session from outside: what every step did, the gradients of the first, the weights after the last.

It wraps the methods of the class, so that a program with a loop of its own is recorded like any other.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.config import Batching, Config, load_config
from shardwise.config.hub import use_fetched
from shardwise.config.load import OWN, make_task
from shardwise.config.seeds import Purpose
from shardwise.data import Cursor, GlobalOrder, StepBatch, loader
from shardwise.data.order import Indices
from shardwise.data.seeding import seed_everything
from shardwise.engine.session import Session
from shardwise.engine.step import StepResult
from shardwise.verify.contents import contents_of
from shardwise.verify.dropout import switch_off_in
from shardwise.verify.job import Job, config_for
from shardwise.verify.measure import rounding_of
from shardwise.verify.names import canonical, tied_names
from shardwise.verify.own_gradients import OwnGradients

data_loader: Any = loader
"""Its function `shares` is replaced where one process computes the micro-batches of the ranks."""
SHARED_ABOVE = 1.0
"""Seconds: data that takes longer to make is made once and copied."""
WHOLE_ON_EVERY_RANK = 30_000_000
"""Elements of a model up to which every rank writes its tensors down; above, rank 0 does, and the others fingerprints."""


class Finished(Exception):
    """What this process was started for has been done."""


class Recorder:
    def __init__(self, job: Job, rank: int, tell: Callable[..., None]) -> None:
        self.job, self.rank, self.tell = job, rank, tell
        self.session: Session | None = None
        self.asked: Config | None = None
        """The config as the user wrote it."""
        self.record: dict[str, Any] = {
            "gradients": {},
            "gradient_digests": {},
            "own_gradients": {},
            "inputs": {},
            "buffers": {},
            "snapshots": {},
        }
        self._own_gradients: OwnGradients | None = None
        self._as_they_were: list[tuple[nn.Parameter, Tensor]] = []
        self._done = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        wrapped = ("__init__", "prepare", "order", "batches", "step", "resume", "close")
        before = {name: getattr(Session, name) for name in wrapped}
        recorder = self

        def init(session: Session, config: Config | str | Path) -> None:
            config = config if isinstance(config, Config) else load_config(config)
            recorder.asked = config
            changed = config_for(config, recorder.job)
            seed_everything(config.seed, Purpose.WEIGHTS)  # for a model that a program builds before prepare()
            before["__init__"](session, changed)
            recorder.session = session
            recorder.tell(phase="joined the other ranks")

        def prepare(session: Session, *args: Any, **options: Any) -> nn.Module:
            model = recorder.prepare(session, before["prepare"], *args, **options)
            recorder.prepared(session)
            return model

        def order(session: Session) -> GlobalOrder:
            whole = before["order"](session)
            plan = recorder.job.plan
            reorder = None if recorder.job.same_shares else recorder.job.reorder
            return Window(whole, plan.window, reorder) if plan else whole

        def batches(session: Session) -> Iterator[StepBatch]:
            recorder.before_first_batch(session)
            return before["batches"](session)

        def step(session: Session, batch: StepBatch) -> StepResult:
            recorder.tell(phase=f"in step {session.steps_done + 1}", step=session.steps_done + 1)
            if recorder.job.reorder is not None:
                recorder.change_last_digits(session)
            if session.steps_done == 0:
                recorder.look_at(batch)
            with recorder.first_step_unclipped(session):
                result = before["step"](session, batch)
            recorder.stepped(session, batch, result)
            return result

        def resume(session: Session, which: str = "auto") -> Path | None:
            path = before["resume"](session, which)
            if path is not None:
                recorder.snapshot(session, "resumed")
            return path

        def close(session: Session) -> None:
            if sys.exc_info()[0] is None:
                recorder.finish()
            before["close"](session)

        shares = data_loader.shares

        def ranks_shares(indices: Indices, batching: Batching, rank: int) -> list[Indices]:
            """The micro-batches of all ranks, one after the other."""
            assert recorder.job.plan is not None
            asked = recorder.job.plan.batching
            parts = [part for each in range(asked.world) for part in shares(indices, asked, each) if len(part)]
            seed = recorder.job.reorder
            return parts if seed is None else [np.random.default_rng([seed, *part]).permutation(part) for part in parts]

        try:
            if recorder.job.same_shares:
                data_loader.shares = ranks_shares
            for name, method in zip(wrapped, (init, prepare, order, batches, step, resume, close), strict=True):
                setattr(Session, name, method)
            yield
        finally:
            data_loader.shares = shares
            for name, original in before.items():
                setattr(Session, name, original)

    # ---------------------------------------------------------------- before the first step

    def prepare(self, session: Session, original: Callable[..., nn.Module], *args: Any, **options: Any) -> nn.Module:
        """Where the config names a task, its data is made once, by the probe, if that takes long."""
        self.tell(phase="preparing")
        shared = self.job.shared
        if args or options or session.config.task == OWN or shared is None:
            return original(session, *args, **options)
        if shared.exists() and is_own(shared):
            task, train, valid = pickle.loads(shared.read_bytes())
            task.config = use_fetched(session.config)
            task.train_data, task.valid_data = (lambda: train), (lambda: valid)
            return original(session, task)
        if self.job.kind != "probe":
            return original(session)
        task = make_task(session.config)
        began = time.perf_counter()
        seed_everything(session.config.seed, Purpose.DATA)
        session.world.on_each_machine(task.prepare_data)
        train, valid = task.train_data(), task.valid_data()
        if time.perf_counter() - began > SHARED_ABOVE:
            kept, task.config = task.config, None  # its class is made at run time; every run has its own anyway
            try:
                shared.write_bytes(pickle.dumps((task, train, valid)))
            except Exception:  # an open file, for example: every run makes its own then
                shared.unlink(missing_ok=True)
            task.config = kept
        task.train_data, task.valid_data = (lambda: train), (lambda: valid)
        return original(session, task)

    def prepared(self, session: Session) -> None:
        module = session.parts.spread.module
        switch_off_in(session.model)
        if self.job.plan is not None:
            session.cursor = Cursor(0, self.job.plan.start)
        session.parts.optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: self._before_update(session))
        self.record |= {
            "batching": asdict(session.batching),
            "strategy": session.strategy,
            "samples": len(session.train_data),
            "tied": tied_names(module),
            "initial": digests(self._whole(module.named_parameters())),
            "initial_weights": self._kept(self._whole(module.named_parameters())),
            "trainable": [canonical(name) for name, each in module.named_parameters() if each.requires_grad],
            "constants": digests(self._whole(_constants(module))),
        }
        if self.job.watched and sum(each.numel() for each in module.parameters()) <= WHOLE_ON_EVERY_RANK:
            self._own_gradients = OwnGradients(module)
        self.tell(phase="prepared")

    def before_first_batch(self, session: Session) -> None:
        if self.job.kind == "probe":
            from shardwise.verify.probe import probe

            assert self.asked is not None
            self.record["probe"] = probe(session, self.asked, self.job)
            self._write()
            self._done = True
            raise Finished
        if self.job.kind == "coverage":
            from shardwise.verify.coverage import cover

            assert self.asked is not None
            self.record["coverage"] = cover(session, self.job)
            self._write()
            self._done = True
            raise Finished
        if self.job.resume and session.checkpoints.saved_at is None:  # a program that did not do so itself
            session.resume("latest")

    # ---------------------------------------------------------------- steps

    def look_at(self, batch: StepBatch) -> None:
        """What the first step trains on, by samples: to be compared with what another process read."""
        self.record["inputs"] = {tuple(micro.request.ids.tolist()): contents_of(micro.inputs) for micro in batch.micro}

    @contextmanager
    def first_step_unclipped(self, session: Session) -> Iterator[None]:
        """So that the gradients of the first step are seen as they are. The others are clipped."""
        parts, kept = session.parts, session.parts.config
        if session.steps_done == 0:
            training = kept.training.model_copy(update={"gradient_clip": None})
            parts.config = kept.model_copy(update={"training": training})
        try:
            yield
        finally:
            parts.config = kept

    def change_last_digits(self, session: Session) -> None:
        """Every weight off by a rounding error in this step: what any other order of additions may do to a result."""
        eps = rounding_of(session.config.training.precision)
        generator = torch.Generator().manual_seed(1000 * (self.job.reorder or 0) + session.steps_done)
        with torch.no_grad():
            for parameter in session.parts.parameters:
                self._as_they_were.append((parameter, parameter.detach().clone()))
                noise = 2 * torch.rand(parameter.shape, generator=generator).to(parameter.device) - 1
                parameter.mul_(1 + noise * eps)

    def _before_update(self, session: Session) -> None:
        with torch.no_grad():
            for parameter, value in self._as_they_were:
                parameter.copy_(value)
        self._as_they_were.clear()
        if self.job.kill_at == session.steps_done + 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if session.steps_done == 0 and not self.record["gradient_digests"]:
            spread = session.parts.spread
            found = ((name, spread.gradient_of(each)) for name, each in spread.module.named_parameters())
            grads = self._whole((name, grad) for name, grad in found if grad is not None)
            self.record["gradients"] = self._kept(grads)
            self.record["gradient_digests"] = digests(grads)
            if self._own_gradients is not None:
                self.record["own_gradients"] = self._own_gradients.stop(session.parts.scaler.get_scale())

    def stepped(self, session: Session, batch: StepBatch, result: StepResult) -> None:
        self.tell(
            step=result.step,
            loss=session.loss(result),
            grad_norm=result.grad_norm,
            lr=result.lr,
            # Ranks of a pipeline, or that share every matrix, work on the same samples: one speaks for all.
            ids=batch.ids if session.layout.counts else [],
            count=result.count,
            global_count=result.global_count,
            skipped=result.skipped,
            stopped=result.stopped,
            epoch=batch.epoch,
        )
        if session.steps_done == 1:  # the ranks have different samples in it, and nobody has saved yet
            self.record["buffers"] = digests(_locals(session.parts.spread.module.named_buffers()))
        if session.steps_done == self.job.save_at and not result.stopped:
            session.save()
            session.wait()
            self.snapshot(session, "saved")

    def snapshot(self, session: Session, when: str) -> None:
        """What a checkpoint must carry, as this rank holds it."""
        module, optimizer = session.parts.spread.module, session.parts.optimizer
        names = {id(each): canonical(name) for name, each in module.named_parameters()}
        state = {
            f"{names.get(id(each), '?')} {key}": _digest(_local(value))
            for each, values in optimizer.state.items()
            for key, value in values.items()
            if isinstance(value, Tensor)
        }
        self.record["snapshots"][when] = {
            "weights": digests(_locals(module.named_parameters())),
            "buffers": digests(_locals(_running(module))),
            "optimizer": state,
            "steps_done": session.steps_done,
            "cursor": asdict(session.cursor),
            "next_lr": session.parts.schedule.rate(session.steps_done),
            "scaler": session.parts.scaler.state_dict(),
        }

    def finish(self) -> None:
        """After the last step, before the ranks part."""
        session = self.session
        if self._done or session is None or session._parts is None:
            return
        self._done = True
        self.tell(phase="writing its record")
        module = session.parts.spread.module
        weights = self._whole(module.named_parameters())
        self.snapshot(session, "end")
        self.record |= {
            "weights": self._kept(weights),
            "weight_digests": digests(weights),
            "steps_done": session.steps_done,
            "skipped_steps": session.skipped_steps,
        }
        self._write()

    def _write(self) -> None:
        torch.save(self.record, self.job.record(self.rank))

    # ---------------------------------------------------------------- tensors

    def _whole(self, named: Any) -> dict[str, Tensor]:
        """On the host, put together where they are sharded. All ranks come here together."""
        return {canonical(name): _gathered(each.detach()).cpu().clone() for name, each in named}

    def _kept(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        small = sum(each.numel() for each in tensors.values()) <= WHOLE_ON_EVERY_RANK
        return tensors if self.rank == 0 or small else {}


class Window(GlobalOrder):
    """The last samples of every epoch's order, as if they were all: a few steps then see the end of an epoch."""

    def __init__(self, whole: GlobalOrder, samples: int, reorder: int | None = None) -> None:
        super().__init__(samples, whole.seed)
        self.whole, self.reorder = whole, reorder

    @property
    def name(self) -> str:
        return self.whole.name

    def part(self, epoch: int, begin: int, end: int) -> Indices:
        first = self.whole.samples - self.samples
        ids = self.whole.part(epoch, first + begin, first + end)
        if self.reorder is None:
            return ids
        return np.random.default_rng([self.reorder, epoch, begin]).permutation(ids)


def is_own(file: Path) -> bool:
    """Whether nobody but this user can have put it there: it is about to be unpickled."""
    about, folder = file.lstat(), file.parent.lstat()
    return about.st_uid == folder.st_uid == os.getuid() and not folder.st_mode & 0o077


def digests(tensors: dict[str, Tensor]) -> dict[str, str]:
    return {name: _digest(tensor) for name, tensor in tensors.items()}


def _digest(tensor: Tensor) -> str:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(data.tobytes(), digest_size=12).hexdigest()


def _gathered(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _locals(named: Any) -> dict[str, Tensor]:
    return {canonical(name): _local(each.detach()) for name, each in named}


def _running(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers that training changes, such as running statistics: those in the state dict."""
    kept = set(module.state_dict())
    return ((name, each) for name, each in module.named_buffers() if name in kept)


def _constants(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All buffers, before the first step: none has changed yet."""
    return module.named_buffers()
