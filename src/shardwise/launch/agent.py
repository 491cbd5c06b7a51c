"""torchrun's elastic agent, and what it does not decide: who was guilty, whether to start again, and when to leave.

The agent starts the ranks of this machine, notices when one ends, and starts all of them again. Here it also looks whether
they still do something, ends at once those that wait for a dead one, and does not repeat what cannot succeed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.multiprocessing.api import LogsSpecs

from shardwise.compat.elastic import ElasticAgent
from shardwise.launch.elastic_exit import ending_well
from shardwise.watch.console import PLAIN
from shardwise.watch.diagnosis import Kind, Verdict, ranks
from shardwise.watch.exit_codes import AGAIN, INTERRUPTED
from shardwise.watch.failures import read_failures
from shardwise.watch.heartbeats import Phase, read_heartbeats
from shardwise.watch.held_folder import HeldFolder
from shardwise.watch.watchdog import Watchdog

log = logging.getLogger(__name__)

GRACE = 2.0
"""Seconds that ranks have to end by themselves when another has failed: they can only wait for it."""
GRACE_AFTER_A_KILL = 0.3
"""The same when it was killed: then nobody's word is needed to know who was first."""
TO_STOP = 60.0
"""Seconds without a sign of life after which a rank that was asked to leave will not."""


@dataclass(frozen=True)
class Job:
    """What the agent runs, and how it is to react."""

    entry: Callable[..., int]
    args: tuple[Any, ...]
    run_folder: Path
    checkpoints: Path
    hang_timeout: float
    restart_on_hang: bool


class Agent(ElasticAgent):
    def __init__(self, spec: WorkerSpec, logs: LogsSpecs, job: Job, scratch: Path) -> None:
        super().__init__(spec=spec, logs_specs=logs, start_method="forkserver")
        self.job, self.scratch = job, scratch
        self.watchdog = Watchdog(scratch, job.run_folder, job.hang_timeout)
        self.asked: int | None = None
        """The signal by which the run was asked to leave."""
        self.verdict: Verdict | None = None
        """On the last failure."""
        self.final: str | None = None
        """Why it is not started again, where that needs a word."""
        self._asked_at = 0.0
        self._attempt = 0
        self._ended: dict[int, tuple[int, float]] = {}
        """Exit code of ranks that ended by themselves, and when, by local rank."""
        self._ended_here: set[int] = set()
        """Local ranks that were ended from here."""
        self._looked_at = 0.0
        self._hang: Verdict | None = None
        """On ranks that hung and were ended for it."""
        self._before: tuple[str, int | None] | None = None
        """The error of the attempt before, and its step."""
        self._held: HeldFolder | None = None
        """The run folder, since the first step: without it, ranks that start again would begin anew."""
        self.lost = ""
        """What became of it, where it is no longer there."""

    # ---------------------------------------------------------------- asked to leave

    def ask(self, number: int) -> None:
        """A signal: the ranks are to save and leave. A second one ends everything at once. Called by another thread."""
        code = INTERRUPTED if number == signal.SIGINT else AGAIN
        if self.asked is not None:
            # A scheduler may send several at a time, a terminal does not.
            if number == signal.SIGINT or time.monotonic() - self._asked_at > 0.5:
                self._leave_at_once(code)
            return
        self.asked, self._asked_at = number, time.monotonic()
        if not self._pids():
            log.warning(f"{signal.Signals(number).name}: left before the ranks had begun", extra=PLAIN)
            self._leave_at_once(code)
        again = "Ctrl-C again to stop at once" if number == signal.SIGINT else "a second signal stops at once"
        log.info(f"stopping before the next step; {again}")
        self._tell()

    def _tell(self) -> None:
        for pid in self._pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def _leave_at_once(self, code: int) -> None:
        shutil.rmtree(self.scratch, ignore_errors=True)
        os._exit(code)  # the ranks die with this process

    def _pids(self) -> list[int]:
        return [process.pid for process in self.processes() if process.is_alive() and process.pid]

    # ---------------------------------------------------------------- the agent's own turns

    def start_ranks(self, group: WorkerGroup) -> dict[int, Any]:
        self.watchdog.forget()
        self._ended, self._ended_here, self._hang = {}, set(), None
        job = self.job
        group.spec.args = (job.entry, job.args, str(self.scratch), self._attempt)
        self._attempt += 1
        log.debug(f"attempt {self._attempt}: the ranks of this machine are started")
        with ending_well(self._end_those_who_wait):
            started = super().start_ranks(group)
        if self.asked is not None:  # in between
            self._tell()
        if group.workers[0].global_rank:
            here = ranks(worker.global_rank for worker in group.workers)
            log.info(f"joined as {here}; the run's lines stand where rank 0 is, on {group.master_addr}")
        return started

    def monitor_ranks(self, group: WorkerGroup) -> RunResult:
        if self._hang is None:  # the agent may see only at its next turn that they have ended
            self._hang = self._look_for_a_hang()
        result = super().monitor_ranks(group)
        if result.is_failed():
            self._after_a_failure(group)
        elif result.state == WorkerState.SUCCEEDED and self._others_left(result):
            log.info("other machines have left or joined; going on with those that are there")
            self.restart_ranks(group)
            return RunResult(state=WorkerState.HEALTHY)
        return result

    def _others_left(self, result: RunResult) -> bool:
        """All ranks have saved and left, and nobody asked it of this machine: it goes on with whoever is left."""
        elastic = self.get_worker_group().spec.rdzv_handler.settings.max_nodes > 1  # type: ignore[attr-defined]
        # Where the time is up, ranks say so by a code of their own: then this machine leaves too.
        return elastic and self.asked is None and set(result.return_values.values()) == {AGAIN}

    def wait_for_other_machines(self) -> None:
        """Machines end together; one that was asked to leave does not wait for those that go on without it."""
        if self.asked is None:
            super().wait_for_other_machines()

    def stop_ranks(self, group: WorkerGroup) -> None:
        """Machines have joined or left: the ranks save and leave, as long as that takes; those that do nothing are ended."""
        if self._pids():
            log.info("another machine joins: the ranks save, leave and start again with it")
            self._tell()
            counters: dict[int, int] = {}
            sign = time.monotonic()
            while self._pids():
                beats = read_heartbeats(self.scratch)
                now = {rank: beat.counter for rank, beat in beats.items()}
                if now != counters:
                    counters, sign = now, time.monotonic()
                saving = any(beat.phase is Phase.SAVE for beat in beats.values())
                if time.monotonic() - sign > (self.job.hang_timeout if saving else TO_STOP):
                    break
                if self.take_results():
                    break
                time.sleep(0.05)
            self._kill(self.processes())
        super().stop_ranks(group)

    # ---------------------------------------------------------------- ranks that end

    def _end_those_who_wait(self) -> None:
        """Once a rank has died, the others can only wait for it: they get a moment to say so, and are ended."""
        processes = self.processes()
        self._note_ends(processes)
        killed = any(code < 0 for code, _ in self._ended.values())
        give_up = time.monotonic() + (GRACE_AFTER_A_KILL if killed else GRACE)
        while any(process.is_alive() for process in processes) and time.monotonic() < give_up:
            time.sleep(0.02)
            self._note_ends(processes)
        self._kill(processes)

    def _note_ends(self, processes: list[Any]) -> None:
        """Of ranks that have ended other than well, and by themselves."""
        for rank, process in enumerate(processes):
            if process.exitcode and rank not in self._ended and rank not in self._ended_here:
                self._ended[rank] = process.exitcode, time.time()

    def _kill(self, processes: list[Any]) -> None:
        for rank, process in enumerate(processes):
            if process.is_alive():
                self._ended_here.add(rank)
                process.kill()
        for process in processes:
            process.join(30)

    def _look_for_a_hang(self) -> Verdict | None:
        now = time.monotonic()
        if now - self._looked_at < min(1.0, self.job.hang_timeout / 4):
            return None
        self._looked_at = now
        if self._held is None and self._has_begun():
            with contextlib.suppress(OSError):
                self._held = HeldFolder(self.job.run_folder, "run folder")
        verdict = self.watchdog.look()
        if verdict is not None:
            self._kill(self.processes())
        return verdict

    def _after_a_failure(self, group: WorkerGroup) -> None:
        by_rank = {group.workers[local].global_rank: end for local, end in self._ended.items()}
        verdict = self.verdict = self._hang or self.watchdog.judge(by_rank)
        self.lost = self._what_became_of_the_run_folder()
        self.final = self.lost or self._why_not_again(verdict, self._hang is not None)
        if self.final is not None or not self.remaining_restarts:
            self.remaining_restarts = 0
            return
        total = group.spec.max_restarts
        step = newest_step(self.job.checkpoints)
        log.warning(
            f"{verdict.sentence}\nrestart {total - self.remaining_restarts + 1} of {total}: "
            + (f"going on from step {step}" if step is not None else "from the beginning, there is no checkpoint yet"),
            extra=PLAIN,
        )

    def _what_became_of_the_run_folder(self) -> str:
        """Empty: it is there, or there was none yet."""
        with contextlib.suppress(OSError):
            if self._held is not None:
                return self._held.lost()
            if self._has_begun() and not (self.job.run_folder / "run.json").exists():
                return f"the run folder {self.job.run_folder} is not what it was: it has no run.json any more"
        return ""

    def _has_begun(self) -> bool:
        """Rank 0 has described the run in its folder: a rank of this machine is on its way to a step, or was."""
        phases = {beat.phase for beat in read_heartbeats(self.scratch).values()}
        return bool(phases & {Phase.DATA, Phase.AGREE, Phase.COMPUTE, Phase.UPDATE, Phase.EVALUATE})

    def _why_not_again(self, verdict: Verdict, hang: bool) -> str | None:
        """None: it may well succeed the next time."""
        if self.asked is not None:
            return ""
        if hang and not self.job.restart_on_hang:
            return "training.on_hang: stop"
        if verdict.kind is not Kind.ERROR:
            return None
        errors = read_failures(self.scratch)
        error = errors.get(verdict.guilty[0])
        beat = read_heartbeats(self.scratch).get(verdict.guilty[0])
        if error is None:
            return None
        if error.for_user:
            return ""
        if self._attempt == 1 and (beat is None or beat.phase.startup):
            return ""  # it never got going: the same would happen again
        before, self._before = self._before, (error.message, verdict.step)
        return "the same error as before the restart" if before == self._before else None


def newest_step(checkpoints: Path) -> int | None:
    """Of the checkpoints that are in place."""
    names = checkpoints.iterdir() if checkpoints.is_dir() else ()
    steps = [int(match[1]) for path in names if (match := re.fullmatch(r"step-(\d{8,})", path.name))]
    return max(steps, default=None)
