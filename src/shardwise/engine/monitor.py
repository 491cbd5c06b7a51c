"""Tells what the run is doing: the log line, metrics.jsonl, the ranks' telemetry, the trackers, the summary."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardwise.checkpoint import Written
from shardwise.compat.versions import untested_version
from shardwise.config.commands import FRESH, RESUME, command, takes_machines, twice_as_long, user_command
from shardwise.data import StepBatch
from shardwise.engine.observers import Observer
from shardwise.engine.run import Run
from shardwise.engine.session import Session
from shardwise.engine.step_result import StepResult
from shardwise.parallel.recipe import has_batch_norm, has_synced_batch_norm
from shardwise.watch.console import Console
from shardwise.watch.rates import Rates, clock, device_name, memory, peak_flops, short
from shardwise.watch.run_folder import RunFolder, unused_folder
from shardwise.watch.stragglers import Pace, Stragglers, Window
from shardwise.watch.trackers import Tracker, open_trackers

MUCH_WAITING = 0.1
"""The share of the time spent waiting for data above which a run says so."""


@dataclass
class FitResult:
    folder: Path
    steps: int
    stopped: bool
    """Asked to stop, by Ctrl-C or a signal, and left with a checkpoint."""
    before: dict[str, float]
    after: dict[str, float]
    """Evaluation metrics at the start and at the end."""


class Monitor(Observer):
    def __init__(self, session: Session, folder: RunFolder, console: Console) -> None:
        self.session, self.folder, self.console = session, folder, console
        world = session.world
        name = device_name(world.device)
        peak = peak_flops(name)
        self.rates = Rates(session.task.flops_per_count(session.strategy.whole), peak * world.size if peak else None)
        self.device_name = name
        self.trackers: list[Tracker] = []
        self.first_loss: float | None = None
        self.last_loss: float | None = None
        self.before: dict[str, float] = {}
        self.after: dict[str, float] = {}
        self.last_norm = 0.0
        self._window, self._stragglers = Window(), Stragglers()
        self._unread: list[StepResult] = []
        """Steps whose times are not in the window yet: a device may still be making the last of them."""
        self._said_wait = False
        self._idle = self._computing = self._compiling = 0.0

    # Everything below that reduces over ranks is called by every rank; only rank 0 writes and speaks.

    def begin(self, resumed: Path | None, *, resuming: bool) -> None:
        session, batching = self.session, self.session.batching
        if resuming or self.folder.begins_anew:  # from the beginning, where there was no checkpoint yet
            self.folder.forget_after(session.steps_done if resumed else -1)
        changes: list[str] = []
        if session.world.is_first:
            changes = self.folder.changes_to(session.config) if resumed else []
            self.folder.describe(session.config, self._facts())
            self.trackers = open_trackers(session.config, self.folder.path)
        parameters = sum(parameter.numel() for parameter in session.strategy.whole.parameters())
        devices = f"{session.world.size} × {self.device_name}" if session.world.size > 1 else self.device_name
        self.console.say(
            f"{session.config.name}: {session.config.task}, {short(parameters)} parameters, {len(session.train_data)} samples "
            f"on {devices}, strategy {session.strategy.name}, precision {session.config.training.precision}"
        )
        self.console.say(
            f"batch {batching.batch_size} per device × {batching.accumulation} accumulation × {batching.world} devices "
            f"{'=' if batching.divides else '→'} {batching.global_batch} per step; {session.steps_per_epoch} steps per epoch, "
            f"{session.total_steps} in all; "
            f"peak rate {session.parts.schedule.peak:.3g}"
        )
        if untested := untested_version():
            self.console.warn(untested)
        if session.plan.found_how:
            self.console.say(session.plan.found_how)
        if said := session.startup.sentence():
            self.console.say(said)
        self._warn_of_batch_norm()
        for sentence in session.strategy.notes(batching.accumulation):
            self.console.say(sentence)
        if resumed is not None:
            self.console.say(f"resumed from {resumed} at step {session.steps_done}")
            if changes:
                self.console.say("changed since then, the earlier config is kept beside:  " + ";  ".join(changes))
            before = session.resumed_from.global_batch if session.resumed_from else batching.global_batch
            if before != batching.global_batch:
                self.console.warn(
                    f"the global batch was {before} and is {batching.global_batch} now, so the curve "
                    f"will not be the same; training.total_batch_size: {before} keeps it"
                )
            if session.extra_state_lost:
                self.console.warn(session.strategy.extra_state_lost)
            self._recall()
        self.rates.began = time.perf_counter()

    def after_step(self, run: Run, batch: StepBatch, result: StepResult) -> None:
        if result.rollback:
            self._went_back(result)
        elif not result.stopped:
            self._stepped(result)

    def _stepped(self, result: StepResult) -> None:
        session = self.session
        self.rates.add(result.samples, result.global_count, result.times.get("wait", 0.0))
        if result.step > 1:  # the first includes the start of workers, and whatever is made once
            self._unread.append(result)
        self._idle += result.times.get("idle", 0.0)
        self._computing += result.times.get("compute", 0.0)
        self._tell_compiling()
        done, every = session.steps_done, session.config.training.log_every_n_steps
        if result.skipped:
            what = result.trouble or "gradient not finite, as fp16 finds its loss scale"
            self.console.say(f"step {done}: {what}: step skipped (all ranks; {session.skipped_steps} so far)")
        if result.awaited is None:
            self.last_norm = result.grad_norm
        due = done % every == 0 or done == 1 or done == session.total_steps
        if not due:
            self.console.show(self._line(done, {"lr": result.lr, "grad_norm": self.last_norm, "loss": self.last_loss}))
            return
        loss = session.loss(result)
        self.last_norm = result.grad_norm
        for step in self._unread:
            self._window.add(step.wait().times)
        self._unread.clear()
        self.last_loss = loss if result.global_count else self.last_loss
        self.first_loss = self.last_loss if self.first_loss is None else self.first_loss
        gib, kind = memory(session.world.device)
        readings = self.rates.read()
        pace = self._window.read()
        everyone = session.world.gather((readings["data_wait_share"] or 0.0, pace and asdict(pace)))
        # The rank that waits longest holds up all of them.
        readings["data_wait_share"] = max(share for share, _ in everyone)
        slow = self._stragglers.judge([each and Pace(**each) for _, each in everyone])
        record: dict[str, Any] = {
            "step": done,
            "epoch": session.cursor.epoch if session.cursor.consumed else session.cursor.epoch - 1,
            "loss": self.last_loss,
            "lr": result.lr,
            "grad_norm": result.grad_norm,
            **readings,
            "memory_gib": round(gib, 3),
            "memory_kind": kind,
            "skipped_steps": session.skipped_steps,
            "eta_seconds": round(self.rates.seconds_left(session.total_steps - done), 1),
        }
        if slow:
            record["stragglers"] = [asdict(each) for each in slow]
        mine = [each.cause for each in slow if each.rank == session.world.rank]
        self.folder.add_telemetry(
            {"step": done, "time": time.time(), "rank": session.world.rank, "seconds": _rounded(result.times),
             "memory_gib": round(gib, 3), "memory_kind": kind, "count": result.count, **({"straggler": mine[0]} if mine else {})}
        )  # fmt: skip
        if session.world.is_first:
            self.folder.add_metrics(record)
            self._track(done, {key: value for key, value in record.items() if isinstance(value, float)})
        self.console.say(self._line(done, record))
        for each in slow:
            self.console.warn(f"step {done}: {each.sentence()}")
        self._warn_of_waiting(done, record["data_wait_share"])

    def _went_back(self, result: StepResult) -> None:
        """The steps since the checkpoint come again: what was logged of them must not stand there twice."""
        self.console.say(f"step {result.step}: {result.trouble}")
        self.folder.forget_after(self.session.steps_done)
        self.rates.read()

    def evaluated(self, run: Run, metrics: dict[str, float]) -> None:
        if not metrics:
            return
        done = self.session.steps_done
        self.before = self.before or metrics
        self.after = metrics
        if self.session.world.is_first:
            self.folder.add_metrics({"step": done, "eval": metrics})
            self._track(done, {f"eval/{name}": value for name, value in metrics.items()})
        self.console.say(f"step {done}  evaluation  " + "  ".join(f"{k} {v:.4g}" for k, v in metrics.items()))

    def saved(self, run: Run, written: Written) -> None:
        if not written.problem:
            self.console.say(
                f"step {written.step}  checkpoint {written.path} in place after {written.seconds:.1f} s, "
                f"of which training stood still {written.stall:.2f} s"
            )
        seconds = _rounded({"stall": written.stall, "in_place": written.seconds})
        self.folder.add_telemetry(
            {"step": written.step, "time": time.time(), "rank": self.session.world.rank, "checkpoint": seconds,
             "problem": written.problem}
        )  # fmt: skip

    @contextmanager
    def pausing(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.rates.pause(time.perf_counter() - began)

    def end(self, stopped: bool) -> FitResult:
        for tracker in self.trackers:
            tracker.close()
        self.console.say(self._goodbye() if stopped else self._summary())
        return FitResult(self.folder.path, self.session.steps_done, stopped, self.before, self.after)

    def _goodbye(self) -> str:
        return f"stopped before step {self.session.steps_done + 1}. Go on with:  {user_command(RESUME, 'auto')}"

    def _summary(self) -> str:
        session = self.session
        before = session.resumed_from.step if session.resumed_from else 0
        if session.steps_done > before:
            lines = ["", f"done: {session.steps_done} steps, {short(self.rates.average_samples())} samples/s"]
        else:
            lines = ["", f"nothing was left to do: this run has made all of its {session.total_steps} steps"]
        if self.first_loss is not None and self.last_loss is not None:
            lines.append(f"  {'training loss':<22} {self.first_loss:.4g} → {self.last_loss:.4g}")
        for name, value in self.after.items():
            lines.append(
                f"  {name.replace('_', ' '):<22} {_figure(name, self.before.get(name))} → {_figure(name, value)}"
            )
        if self.session.skipped_steps:
            lines.append(f"  {'skipped steps':<22} {self.session.skipped_steps}")
        for what, how_much in self.session.strategy.summary(self._idle, self._computing):
            lines.append(f"  {what:<22} {how_much}")
        lines += [f"  {'run folder':<22} {self.folder.path}", "next:"]
        for what, line in self._next():
            lines += [f"  {what}:", f"    {line}"]
        return "\n".join(lines)

    def _next(self) -> Iterator[tuple[str, str]]:
        """What to do now, and the command that does it: it stands on a line of its own, to be copied."""
        config = self.session.config
        own_code = ":" in config.task  # export imports it at the word of a config only, not of a run folder
        if not own_code or config.source is not None:
            trusted = ["--config", *config.source.words] if own_code and config.source is not None else []
            yield (
                "weights for use elsewhere",
                command("export", self.folder.path, "--to", unused_folder(Path("model")), *trusted),
            )
        longer = twice_as_long(config.training)
        yield "go on for as long again", user_command(*([] if takes_machines() else [RESUME, "auto"]), *longer)
        if not takes_machines():
            yield "start anew, twice as long; any key can be set so", user_command(FRESH, *longer)

    def _line(self, step: int, record: dict[str, Any]) -> str:
        total = self.session.total_steps
        parts = [f"step {step:>{len(str(total))}}/{total}"]
        if record["loss"] is not None:
            parts.append(f"loss {record['loss']:.4f}")
        parts += [f"lr {record['lr']:.2e}", f"grad {record['grad_norm']:.3g}"]
        if "samples_per_second" in record:
            parts.append(f"{short(record['samples_per_second'])} samples/s")
            if self.session.task.unit != "samples":
                parts.append(f"{short(record['counts_per_second'])} {self.session.task.unit}/s")
            mfu = record["mfu"]
            parts.append(f"MFU {mfu:.1%}" if mfu is not None else f"MFU unknown ({self.device_name})")
            parts.append(f"data wait {record['data_wait_share']:.0%}")
            parts.append(f"{record['memory_gib']:.2f} GiB {record['memory_kind']}")
        parts.append(f"ETA {clock(self.rates.seconds_left(total - step))}")
        return "  ".join(parts)

    def _tell_compiling(self) -> None:
        """Compilation is told apart: it is no training time."""
        regions = self.session.strategy.regions
        if regions is None or regions.seconds == self._compiling:
            return
        took, self._compiling = regions.seconds - self._compiling, regions.seconds
        self.rates.pause(took)
        if regions.problem is None:
            self.console.say(f"compiled {len(regions.blocks)} part(s) of the model in {took:.1f} s")

    def _warn_of_batch_norm(self) -> None:
        model, world = self.session.strategy.module, self.session.world
        if not has_batch_norm(model):
            return
        batching = self.session.batching
        rest = len(self.session.train_data) % batching.global_batch
        if rest and rest // world.size <= 1 and batching.batch_size > 1:
            self.console.warn(
                f"the last batch of an epoch has {rest} sample(s) for {world.size} rank(s): batch norm learns little "
                "from one sample, or fails on it; another training.batch_size avoids it"
            )
        if world.size > 1:
            self.console.say(
                "batch norm: statistics over the micro-batches of all ranks (SyncBatchNorm)"
                if has_synced_batch_norm(model)
                else f"batch norm: each rank's statistics come from its own {self.session.batching.batch_size} samples, so the "
                "numbers depend on how many ranks there are; running statistics are rank 0's"
            )

    def _warn_of_waiting(self, step: int, share: float) -> None:
        """Said once. The first step is left out: it includes the start of the workers."""
        if share <= MUCH_WAITING or step == 1 or self._said_wait:
            return
        self._said_wait = True
        data, world = self.session.config.data, self.session.world
        room = max(1, (os.cpu_count() or 1) // max(1, world.size))
        remedy = (
            f"data.num_workers is 0: set it to {min(4, room)} or more, and the next batch is read while this one computes"
            if data.num_workers == 0
            else f"data.num_workers is {data.num_workers}: raise it while there are idle cores (here {os.cpu_count()}), or "
            "read less per sample"
        )
        source = self.session.config.source
        measured = "" if source is None else f". Which part is slow:  {command('bench', 'data', *source.words)}"
        self.console.warn(f"step {step}: {share:.0%} of the time is spent waiting for data. {remedy}{measured}")

    def _track(self, step: int, values: dict[str, float]) -> None:
        for tracker in self.trackers:
            tracker.log(step, values)

    def _recall(self) -> None:
        """What the run had measured before it was interrupted, for the summary."""
        for record in self.folder.metrics():
            if "eval" in record:
                self.before = self.before or record["eval"]
                self.after = record["eval"]
            elif self.first_loss is None:
                self.first_loss = record.get("loss")

    def _facts(self) -> dict[str, Any]:
        session, batching = self.session, self.session.batching
        formula = type(session.task).flops_per_count.__doc__ if self.rates.flops_per_count else None
        return {
            "world": session.world.size,
            "device": self.device_name,
            "strategy": session.strategy.name,
            "batch": {
                "per_device": batching.batch_size,
                "accumulation": batching.accumulation,
                "global": batching.global_batch,
                "chosen_for": session.plan.chosen_for,
            },
            "total_steps": session.total_steps,
            "start": {what: round(seconds, 2) for what, seconds in session.startup.seconds.items()},
            "mfu": {"formula": formula, "peak_flops": self.rates.peak, "peak": "dense bf16, all devices"},
        }


def _figure(name: str, value: float | None) -> str:
    if value is None:
        return "none"
    return f"{value:.2%}" if name.endswith(("_share", "accuracy", "_agreement")) else f"{value:.4g}"


def _rounded(times: dict[str, float]) -> dict[str, float]:
    return {name: round(seconds, 6) for name, seconds in times.items()}
