"""Watches the ranks of this machine from outside: whether they beat, and if not, who waits where for whom.

Without torch: it also runs as a small process of its own, where ranks were started by torchrun or srun.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.watch.console import PLAIN, follow_log_level, program_logging
from shardwise.watch.diagnosis import Sighting, Verdict, verdict_on
from shardwise.watch.failures import read_failures
from shardwise.watch.heartbeats import Beat, read_heartbeats
from shardwise.watch.procfs import MemoryWord, cpu_seconds, is_same_process, state_of
from shardwise.watch.stacks import parse_stack

log = logging.getLogger("shardwise.watch.watchdog")  # also where this module is __main__

TO_TELL = 5.0
"""Seconds that a rank has to write down where it is."""
BUSY = 0.25
"""A rank that uses more than this share of a processor computes; one that waits uses a little for telling where it is."""
STOOD_STILL = 10.0
"""Seconds between two looks, which come every second, from which follows that the whole machine or job was stopped."""
ALIVE = 0.02
"""A rank that starts up and uses more than this share of a processor is alive, however long it takes."""


@dataclass
class _Sign:
    beat: Beat
    seen_at: float
    cpu: float = 0.0


class Watchdog:
    def __init__(self, beats: Path, run_folder: Path, hang_timeout: float) -> None:
        """`beats`: the folder that the ranks of this machine beat into; their errors and stacks are there too."""
        self.beats, self.run_folder, self.hang_timeout = beats, run_folder, hang_timeout
        self.memory = MemoryWord()
        self._signs: dict[int, _Sign] = {}
        self._looked_at = time.monotonic()

    def look(self) -> Verdict | None:
        """Called about every second. A verdict, if a rank has not beaten for too long."""
        now = time.monotonic()
        if now - self._looked_at > STOOD_STILL:  # this process was stopped, and the ranks with it: that is no hang
            for known in self._signs.values():
                known.seen_at = now
        self._looked_at = now
        silent = []
        starting_up = False
        for rank, beat in self.living().items():
            sign = self._signs.get(rank)
            if sign is None or (sign.beat.pid, sign.beat.counter) != (beat.pid, beat.counter):
                self._signs[rank] = _Sign(beat, now, cpu_seconds(beat.pid) if beat.phase.startup else 0.0)
            elif now - sign.seen_at > self.hang_timeout:
                if beat.phase.startup and self._works(sign, now):
                    starting_up = True
                    continue
                silent.append((rank, beat.phase.startup))
        # While one rank prepares the data, the others wait for it.
        return self.judge({}) if any(not (starting and starting_up) for _, starting in silent) else None

    def living(self) -> dict[int, Beat]:
        """Not what an earlier job left behind: its ranks are gone, and their numbers may be a stranger's by now."""
        return {
            rank: beat for rank, beat in read_heartbeats(self.beats).items() if is_same_process(beat.pid, beat.wall)
        }

    def _works(self, sign: _Sign, now: float) -> bool:
        """Data and models may take long to load; a process that does something is no hang."""
        cpu = cpu_seconds(sign.beat.pid)
        if cpu - sign.cpu < ALIVE * (now - sign.seen_at):
            return False
        sign.seen_at, sign.cpu = now, cpu
        return True

    def judge(self, ended: Mapping[int, tuple[int, float]]) -> Verdict:
        """`ended`: exit code of ranks that have ended by themselves, and when that was noticed."""
        seen = self.sightings(ended)
        world = max((each.beat.world for each in seen if each.beat), default=len(seen))
        verdict = verdict_on(seen, world, time.monotonic())
        self._keep(verdict, seen)
        return verdict

    def sightings(self, ended: Mapping[int, tuple[int, float]]) -> list[Sighting]:
        beats, errors = read_heartbeats(self.beats), read_failures(self.beats)
        pids = {rank: beat.pid for rank, beat in self.living().items() if rank not in ended}
        before, began = {rank: cpu_seconds(pid) for rank, pid in pids.items()}, time.monotonic()
        if not ended and not errors:
            self._ask_where(pids)
        much = BUSY * (time.monotonic() - began)
        seen = []
        for rank in sorted({*beats, *errors, *ended}):
            code, died_at = ended.get(rank, (None, 0.0))
            pid = beats[rank].pid if rank in beats else 0
            seen.append(
                Sighting(
                    rank,
                    beats.get(rank),
                    parse_stack(_text(self.stack_file(rank))),
                    state_of(pids[rank]) if rank in pids else "",
                    rank in pids and cpu_seconds(pids[rank]) - before[rank] > much,
                    code,
                    died_at,
                    errors.get(rank),
                    self.memory.on(pid) if code == -signal.SIGKILL and pid else None,
                )
            )
        return seen

    def _ask_where(self, pids: Mapping[int, int]) -> None:
        """All stacks. A rank that is stopped cannot answer; any other does, even from within PyTorch."""
        asked = {}
        for rank, pid in pids.items():
            file = self.stack_file(rank)
            if not file.exists() or state_of(pid) in ("T", "t", "Z", ""):
                continue
            asked[rank] = file.stat().st_size
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR2)
        give_up = time.monotonic() + TO_TELL
        sizes: dict[int, int] = {}
        while time.monotonic() < give_up:
            time.sleep(0.2)
            now = {rank: self.stack_file(rank).stat().st_size for rank in asked}
            if now == sizes and all(
                size > asked[rank] for rank, size in now.items()
            ):  # written, and written to the end
                return
            sizes = now

    def stack_file(self, rank: int) -> Path:
        return stack_file(self.beats, rank)

    def _keep(self, verdict: Verdict, seen: list[Sighting]) -> None:
        """In the run folder, with the stacks; if the run has one already, and whatever is the matter with it."""
        if not (self.run_folder / "ranks").is_dir():
            return
        record = {
            "time": time.time(),
            "kind": verdict.kind,
            "sentence": verdict.sentence,
            "guilty": verdict.guilty,
            "step": verdict.step,
            "ranks": [_about(each) for each in seen],
        }
        with contextlib.suppress(OSError):
            with (self.run_folder / "verdicts.jsonl").open("a") as file:
                file.write(json.dumps(record) + "\n")
            for each in seen:
                if each.stack.frames:
                    kept = self.run_folder / "ranks" / f"rank-{each.rank:04d}.stack"
                    shutil.copy(self.stack_file(each.rank), kept)

    def forget(self) -> None:
        """The ranks have ended, others will come: what those left is cleared away."""
        self._signs.clear()
        for file in [*self.beats.glob("rank-*"), *self.beats.glob("error-*.json")]:
            file.unlink(missing_ok=True)


def stack_file(beats: Path, rank: int) -> Path:
    return beats / f"rank-{rank:04d}.stack"


def _about(each: Sighting) -> dict[str, Any]:
    beat, place = each.beat, each.stack.place
    return {
        "rank": each.rank,
        "pid": beat.pid if beat else None,
        "host": beat.host if beat else None,
        "step": beat.step if beat else None,
        "phase": beat.phase.name.lower() if beat else None,
        "since": beat.wall if beat else None,
        "place": place.place if place else None,
        "collective": each.stack.collective,
        "state": each.state,
        "exit_code": each.exit_code,
        "error": each.error.message if each.error else None,
    }


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


def main(arguments: list[str] | None = None) -> int:
    """A process of its own, started by a rank: it ends with that rank. A hang ends the ranks of this machine, and whoever
    started them sees that and decides."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--beats", type=Path, required=True)
    parser.add_argument("--run-folder", type=Path, required=True)
    parser.add_argument("--hang-timeout", type=float, required=True)
    parser.add_argument("--parent", type=int, required=True)
    given = parser.parse_args(arguments)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # they are for the ranks
    overseer = Watchdog(given.beats, given.run_folder, given.hang_timeout)
    while os.getppid() == given.parent:
        if (verdict := overseer.look()) is not None:
            log.error(f"verdict: {verdict.sentence}", extra=PLAIN)
            for beat in overseer.living().values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(beat.pid, signal.SIGKILL)
            break
        time.sleep(1.0)
    shutil.rmtree(given.beats, ignore_errors=True)
    return 0


if __name__ == "__main__":
    with program_logging():
        follow_log_level()
        sys.exit(main())
