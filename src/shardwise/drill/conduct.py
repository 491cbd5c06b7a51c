"""Trains once undisturbed, then with faults until all of them have happened, and measures what each cost."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from shardwise.drill.compare import differences
from shardwise.drill.faults import Fault, Kind
from shardwise.drill.network import two_machines
from shardwise.drill.run import PATIENCE, DrillRun, DrillSpec, Lost
from shardwise.errors import ShardwiseError

NOT_WRITTEN = "could not be written to"
"""What is said of a checkpoint that failed."""
TO_JUDGE = 30.0
"""Seconds in which both machines must have noticed a cut, beyond the time after which a hang is noticed."""


@dataclass
class Recovery:
    """What a fault cost. Seconds."""

    fault: Fault
    at_step: int
    noticed: float = 0.0
    """Until it was decided to start again. Of a hang, beyond the time that it is waited for; of a cut link, from the moment
    that it is back."""
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


def conduct(spec: DrillSpec, faults: Sequence[Fault], say: Callable[[str], None]) -> Result:
    result = Result()
    whole = DrillRun(spec, spec.folder / "undisturbed")
    say("undisturbed, for comparison …")
    try:
        whole.finish()
    except Lost as lost:
        raise ShardwiseError(f"without any fault {lost}") from None
    steps = [record["time"] for record in whole.log.of(0, "stepped")]
    say(f"undisturbed: {len(steps)} steps in {steps[-1] - steps[0]:.1f} s")
    left = list(faults)
    while left and not result.problems:
        result.rounds += 1
        with contextlib.ExitStack() as around:
            machines = around.enter_context(two_machines()) if left[0].kind.needs_two_machines else ()
            run = DrillRun(spec, spec.folder / f"round-{result.rounds}", machines)
            around.callback(run.end)
            began = time.monotonic()
            try:
                happened = _disturb(run, left, result, say, len(faults))
            except Lost as lost:
                result.problems.append(f"round {result.rounds}: {lost}")
                break
        result.seconds += time.monotonic() - began
        result.undisturbed += steps[-1] - steps[0]
        found = differences(whole.folder, run.folder, whole.log.records, run.log.records)
        result.problems += [f"round {result.rounds}: {problem}" for problem in found]
        say(f"round {result.rounds}: {happened} faults, {'; '.join(found) or 'the end is that of the undisturbed run'}")
        if not happened:
            result.problems.append("the run is too short for a fault to happen in it: give it more --steps")
    return result


def _disturb(run: DrillRun, left: list[Fault], result: Result, say: Callable[[str], None], total: int) -> int:
    """One run from its beginning to its end. Takes the faults that happened from `left`, and says how many."""
    happened = 0
    run.start()
    since = time.monotonic()
    while left and left[0].kind.needs_two_machines == bool(run.machines):
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


def _strike(run: DrillRun, fault: Fault) -> Recovery | None:
    """None: the run came to its end before it could happen, or before there was a step to make again."""
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
    if fault.kind is Kind.LINK:
        if not _stay_apart(run, fired["time"]):
            return None
        free_at = time.monotonic()
    else:
        free_at = fired["time"] + (run.spec.hang_timeout if fault.kind.silent else 0.0)

    def back() -> bool:
        began = run.log.after(0, "began", fired["time"])
        return began is not None and run.log.after(0, "stepped", began["time"]) is not None

    if not run.wait_for(back, PATIENCE + free_at - fired["time"]):
        return None
    before = [each["step"] for each in run.log.of(0, "stepped") if each["time"] <= fired["time"]][-1]
    began = run.log.after(0, "began", fired["time"]) or {}
    stepped = run.log.after(0, "stepped", began["time"]) or {}
    restarts = run.restarts_after(fired["time"])
    decided = min(restarts[0][0] if restarts else fired["time"], began["time"])
    if fault.kind is Kind.LINK:
        decided = max(decided, free_at)
    recovery.noticed = max(0.0, decided - free_at)
    recovery.started = began["time"] - decided
    recovery.resumed = stepped["time"] - began["time"]
    recovery.steps_again = max(0, before - stepped["step"] + 1)
    recovery.verdict = restarts[0][1] if restarts else None
    return recovery


def _stay_apart(run: DrillRun, since: float) -> bool:
    """A cable was pulled: both machines must notice before it is put back. False: the run had come to its end by then."""

    def judged() -> bool:
        return len(run.restarts_after(since)) == len(run.machines)

    unnoticed = None
    try:
        run.wait_for(judged, run.spec.hang_timeout + TO_JUDGE)
    except Lost as lost:
        unnoticed = lost
    finally:
        for machine in run.machines:
            machine.put_the_cable_back()
    if unnoticed is not None:
        back_at = time.monotonic()
        if run.wait_for(lambda: bool(run.restarts_after(since) or run.steps_since(back_at))):
            raise unnoticed
    return unnoticed is None
