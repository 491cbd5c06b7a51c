"""Trains once undisturbed, then with faults until all of them have happened, and measures what each cost."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from shardwise.drill.compare import differences
from shardwise.drill.faults import Fault, Kind
from shardwise.errors import ShardwiseError

NOT_WRITTEN = "could not be written to"
"""What is said of a checkpoint that failed."""
PATIENCE = 180.0
"""Seconds in which a run must come back from a fault, beyond the time after which a hang is noticed."""


@dataclass(frozen=True)
class Plan:
    config: str
    overrides: tuple[str, ...]
    ranks: int
    folder: Path
    hang_timeout: float


@dataclass
class Recovery:
    """What a fault cost. Seconds."""

    fault: Fault
    at_step: int
    noticed: float = 0.0
    """Until it was decided to start again. Of a hang, beyond the time that it is waited for."""
    started: float = 0.0
    """Until the first rank ran: processes, imports, the ranks finding each other."""
    resumed: float = 0.0
    """Until the first step was made: model and data prepared, the checkpoint read and checked."""
    steps_again: int = 0
    verdict: str | None = None

    @property
    def seconds(self) -> float:
        return self.noticed + self.started + self.resumed

    @property
    def ours(self) -> float:
        return self.noticed + self.resumed


@dataclass
class Result:
    recoveries: list[Recovery] = field(default_factory=list)
    rounds: int = 0
    seconds: float = 0.0
    """Of all rounds with faults."""
    undisturbed: float = 0.0
    """Of the steps of one run without, times the rounds."""
    problems: list[str] = field(default_factory=list)
    """What was lost or came out differently. Empty: nothing."""

    @property
    def goodput(self) -> float:
        return self.undisturbed / self.seconds if self.seconds else 1.0


def conduct(plan: Plan, faults: Sequence[Fault], say: Callable[[str], None]) -> Result:
    result = Result()
    whole = _Run(plan, plan.folder / "undisturbed")
    say("undisturbed, for comparison …")
    whole.finish()
    steps = [record["time"] for record in whole.log.of(0, "stepped")]
    say(f"undisturbed: {len(steps)} steps in {steps[-1] - steps[0]:.1f} s")
    left = list(faults)
    while left and not result.problems:
        result.rounds += 1
        run = _Run(plan, plan.folder / f"round-{result.rounds}")
        began = time.monotonic()
        try:
            happened = _disturb(run, left, result, say, len(faults))
        except _Lost as lost:
            result.problems.append(f"round {result.rounds}: {lost}")
            break
        finally:
            run.end()
        result.seconds += time.monotonic() - began
        result.undisturbed += steps[-1] - steps[0]
        found = differences(whole.folder, run.folder, whole.log.records, run.log.records)
        result.problems += [f"round {result.rounds}: {problem}" for problem in found]
        say(f"round {result.rounds}: {happened} faults, {'; '.join(found) or 'the end is that of the undisturbed run'}")
        if not happened:
            result.problems.append("the run is too short for a fault to happen in it: give it more --steps")
    return result


class _Lost(Exception):
    """The run did not come back, or did not end well."""


def _disturb(run: _Run, left: list[Fault], result: Result, say: Callable[[str], None], total: int) -> int:
    """One run from its beginning to its end. Takes the faults that happened from `left`, and says how many."""
    happened = 0
    run.start()
    since = time.monotonic()
    while left:
        fault = left[0]
        if not run.wait_for(partial(run.has_made, fault.steps, since)):
            break  # it ended first
        recovery = _strike(run, fault)
        if recovery is None:
            break
        since = time.monotonic()
        happened += 1
        left.pop(0)
        result.recoveries.append(recovery)
        cost = (
            f"going on after {recovery.seconds:.1f} s, {recovery.steps_again} step(s) again"
            if fault.kind.fatal
            else "training went on"
        )
        say(
            f"{fault.number + 1}/{total}  {fault.kind.words}, rank {fault.rank}, step {recovery.at_step}: {cost}"
            + (f"\n        {recovery.verdict}" if recovery.verdict and fault.kind.silent else "")
        )
    run.finish()
    return happened


def _strike(run: _Run, fault: Fault) -> Recovery | None:
    """None: the run ended before it could happen."""
    told_before = run.output().count(NOT_WRITTEN)
    if fault.kind is Kind.LAUNCHER:
        fired: dict[str, Any] = {"time": time.monotonic(), "step": run.log.last_step()}
        run.kill_launcher()
        run.start()
    else:
        order = run.folder / f"order-{fault.rank}.json"
        aside = order.with_suffix(".aside")
        aside.write_text(json.dumps({"number": fault.number, "kind": fault.kind, "moment": fault.moment}))
        aside.rename(order)
        if not run.wait_for(lambda: run.log.fired(fault.number) is not None):
            order.unlink(missing_ok=True)
            return None
        fired = run.log.fired(fault.number) or {}
    recovery = Recovery(fault, fired["step"])
    if not fault.kind.fatal:
        run.wait_for(lambda: run.steps_since(fired["time"]) >= 1)
        if fault.kind is Kind.FULL:  # and the user is told
            run.wait_for(lambda: run.output().count(NOT_WRITTEN) > told_before)
        return recovery

    def back() -> bool:
        began = run.log.after(0, "began", fired["time"])
        return began is not None and run.log.after(0, "stepped", began["time"]) is not None

    waited = run.plan.hang_timeout if fault.kind.silent else 0.0
    if not run.wait_for(back, PATIENCE + waited):
        raise _Lost(
            f"after {fault.kind.words} in rank {fault.rank} at step {fired['step']} the run ended: {run.last_words()}"
        )
    before = [each["step"] for each in run.log.of(0, "stepped") if each["time"] <= fired["time"]][-1]
    began = run.log.after(0, "began", fired["time"]) or {}
    stepped = run.log.after(0, "stepped", began["time"]) or {}
    decided = max(fired["time"], min(run.restart_after(fired["time"]), began["time"]))
    recovery.noticed = max(0.0, decided - fired["time"] - waited)
    recovery.started = began["time"] - decided
    recovery.resumed = stepped["time"] - began["time"]
    recovery.steps_again = max(0, before - stepped["step"] + 1)
    recovery.verdict = run.sentence_after(fired["time"])
    return recovery


class _Run:
    """A training in a folder of its own, its launcher, and what its ranks write down."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan, self.folder = plan, folder
        folder.mkdir(parents=True)
        self.log = _Log(folder, plan.ranks)
        self.process: subprocess.Popen[str] | None = None
        self.said: list[tuple[float, str]] = []

    def start(self) -> None:
        given = {
            "config": self.plan.config,
            "overrides": [
                *self.plan.overrides,
                f"run_dir={self.folder / 'run'}",
                f"training.checkpoint_dir={self.folder / 'run' / 'checkpoints'}",  # never that of a real run
            ],
            "scratch": str(self.folder),
            "ranks": self.plan.ranks,
        }
        self.said.append((time.monotonic(), "restart of the launcher"))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "shardwise.drill.launcher", json.dumps(given)],
            stdout=(self.folder / "output.txt").open("a"),
            stderr=subprocess.PIPE,
            text=True,
        )
        threading.Thread(target=self._listen, args=(self.process,), daemon=True).start()

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        for line in process.stderr:
            self.said.append((time.monotonic(), line.rstrip()))

    def wait_for(self, condition: Callable[[], bool], seconds: float = PATIENCE) -> bool:
        """False: the run ended well before. If it ended otherwise, or nothing happens, the run is lost."""
        give_up = time.monotonic() + seconds
        while time.monotonic() < give_up:
            self.log.read()
            if condition():
                return True
            code = self.process.poll() if self.process else None
            if code == 0:
                self.log.read()
                return condition()
            if code is not None:
                raise _Lost(f"the run ended with exit code {code}: {self.last_words()}")
            time.sleep(0.02)
        raise _Lost(f"nothing happened for {seconds:.0f} s: {self.last_words()}")

    def finish(self) -> None:
        if self.process is None:
            self.start()
        assert self.process is not None
        try:
            self.wait_for(lambda: False, PATIENCE * 5)
        finally:
            self.end()
        if self.process.returncode:
            raise ShardwiseError(f"the run ended with exit code {self.process.returncode}: {self.last_words()}")

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            self.process.wait()

    def kill_launcher(self) -> None:
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def has_made(self, steps: int, since: float) -> bool:
        return self.steps_since(since) >= steps

    def steps_since(self, when: float) -> int:
        return sum(1 for record in self.log.of(0, "stepped") if record["time"] > when)

    def restart_after(self, when: float) -> float:
        """When it was decided to start again."""
        return next((time for time, line in self.said if time >= when and line.startswith("restart ")), when)

    def sentence_after(self, when: float) -> str | None:
        lines = [line for time, line in self.said if time >= when]
        at = next((number for number, line in enumerate(lines) if line.startswith("restart ")), 0)
        return lines[at - 1] if at else None

    def output(self) -> str:
        return (self.folder / "output.txt").read_text(errors="replace")

    def last_words(self) -> str:
        return " / ".join(line for _, line in self.said[-4:]) or "without a word"


class _Log:
    """What the ranks wrote down, read as it grows."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.folder, self.records = folder, list[dict[str, Any]]()
        self._read = dict.fromkeys(range(ranks), 0)

    def read(self) -> None:
        for rank, start in self._read.items():
            file = self.folder / f"rank-{rank}.jsonl"
            if not file.exists():
                continue
            with file.open("rb") as stream:
                stream.seek(start)
                for line in stream:
                    if not line.endswith(b"\n"):
                        break  # not all of it is there yet
                    self._read[rank] += len(line)
                    with contextlib.suppress(json.JSONDecodeError):  # a line that a kill has cut
                        self.records.append(json.loads(line))

    def of(self, rank: int, what: str) -> list[dict[str, Any]]:
        return [record for record in self.records if record["rank"] == rank and record["what"] == what]

    def after(self, rank: int, what: str, when: float) -> dict[str, Any] | None:
        return next((record for record in self.of(rank, what) if record["time"] > when), None)

    def fired(self, number: int) -> dict[str, Any] | None:
        return next((each for each in self.records if each["what"] == "fired" and each["number"] == number), None)

    def last_step(self) -> int:
        steps = self.of(0, "stepped")
        return int(steps[-1]["step"]) if steps else 0
