"""Ranks for a few seconds each: forked from a server that has imported everything already, and watched.

To start a rank costs tenths of a second, so that ranks can be killed for real. A rank that hangs becomes a verdict: at
which step it is, and where in the code.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.config import Batching, load_config
from shardwise.config.load import config_values
from shardwise.launch import server
from shardwise.verify.job import Job, Plan
from shardwise.watch.failures import RankError

TO_PREPARE = 900.0
"""Seconds without a sign of life before the first step: data may have to be downloaded."""
TO_STEP = 120.0
"""The same between two steps."""
ALONE = 8.0
"""The same, when another rank of the group has ended already."""


@dataclass
class RankOutcome:
    rank: int
    exit_code: int | None
    """None: it hung, and was ended."""
    steps: list[dict[str, Any]]
    """What it wrote down after each step."""
    phase: str
    """The last sign of life."""
    error: RankError | None = None
    stack: str = ""

    @property
    def fine(self) -> bool:
        return self.exit_code == 0


@dataclass
class Outcome:
    job: Job
    ranks: list[RankOutcome]
    seconds: float
    _records: dict[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def fine(self) -> bool:
        return all(rank.fine for rank in self.ranks)

    @property
    def killed(self) -> bool:
        return any(rank.exit_code == -signal.SIGKILL for rank in self.ranks)

    def record(self, rank: int = 0) -> dict[str, Any]:
        import torch
        from torch.serialization import safe_globals

        from shardwise.verify.coverage import Coverage, Handed
        from shardwise.verify.probe import Probe, Share

        if rank not in self._records:
            with safe_globals(
                [Batching, Coverage, Handed, Plan, Probe, Share]
            ):  # and tensors and plain data, nothing else
                self._records[rank] = torch.load(self.job.record(rank), weights_only=True)
        return self._records[rank]

    @property
    def records(self) -> list[dict[str, Any]]:
        return [self.record(rank.rank) for rank in self.ranks]

    def first_error(self) -> RankError | None:
        """The first that is not merely the loss of another rank."""
        errors = sorted((rank.error for rank in self.ranks if rank.error), key=lambda error: error.when)
        return next((error for error in errors if not error.peer_lost), errors[0] if errors else None)


def start_server(rehearsed: tuple[Path, Sequence[str]] | None) -> None:
    """Begin to import what every rank needs, in a process of its own. `rehearsed`: a config whose model is built there."""
    # There are more ranks than cores: a thread that waits must not keep one busy.
    values = config_values(load_config(*rehearsed)) if rehearsed else None
    server.start_server(["shardwise.verify.preload"], values, {"OMP_WAIT_POLICY": "PASSIVE"})


def run_jobs(jobs: Iterable[Job], at_once: int, *, patience: float = TO_STEP) -> dict[str, Outcome]:
    """Run groups of ranks, as many at a time as fit into `at_once` processes; by name."""
    waiting = list(jobs)
    running: list[_Group] = []
    done: dict[str, Outcome] = {}
    try:
        while waiting or running:
            while waiting and (not running or sum(g.job.world for g in running) + waiting[0].world <= at_once):
                running.append(_Group(waiting.pop(0), patience))
            time.sleep(0.02)
            for group in [group for group in running if group.ended()]:
                running.remove(group)
                done[group.job.name] = group.outcome()
    finally:
        for group in running:
            group.end()
    return done


class _Group:
    def __init__(self, job: Job, patience: float) -> None:
        from shardwise.verify.rank import rank_main  # torch: not before it is needed

        self.job, self.patience = job, patience
        self.began = time.monotonic()
        self.hung: set[int] = set()
        self._last_sign, self._size = self.began, -1
        job.folder.mkdir(parents=True, exist_ok=True)
        context = multiprocessing.get_context("forkserver")
        port = _free_port()
        self.processes = [
            context.Process(
                target=rank_main, args=(job, rank, port, dict(os.environ), str(Path.cwd())), name=f"{job.name} {rank}"
            )
            for rank in range(job.world)
        ]
        for process in self.processes:
            process.start()

    def ended(self) -> bool:
        alive = [rank for rank, process in enumerate(self.processes) if process.is_alive()]
        if not alive:
            return True
        if self._silent_for() > self._limit(len(alive)):
            self.hung = set(alive)
            for rank in alive:
                self._ask_where(rank)
            time.sleep(0.5)
            self.end()
            return True
        return False

    def _limit(self, alive: int) -> float:
        if alive < len(self.processes):
            return min(ALONE, self.patience)
        stepping = any('"step"' in text_of(self.job.progress(rank)) for rank in range(self.job.world))
        return self.patience if stepping else max(TO_PREPARE, self.patience)

    def _silent_for(self) -> float:
        signs = sum(_size(self.job.progress(rank)) for rank in range(self.job.world))
        signs += sum(not process.is_alive() for process in self.processes)
        if signs != self._size:
            self._last_sign, self._size = time.monotonic(), signs
        return time.monotonic() - self._last_sign

    def _ask_where(self, rank: int) -> None:
        pid = self.processes[rank].pid
        if pid is not None and self.job.stack(rank).exists():  # made when its handler is in place
            os.kill(pid, signal.SIGUSR1)

    def end(self) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
        for process in self.processes:
            process.join()

    def outcome(self) -> Outcome:
        ranks = []
        for rank, process in enumerate(self.processes):
            process.join()
            signs = [json.loads(line) for line in text_of(self.job.progress(rank)).splitlines() if line.endswith("}")]
            steps = [sign for sign in signs if "loss" in sign]
            ranks.append(
                RankOutcome(
                    rank,
                    None if rank in self.hung else process.exitcode,
                    steps,
                    signs[-1].get("phase", f"after step {len(steps)}") if signs else "not started",
                    _error(self.job.folder / f"error-{rank}.json"),
                    text_of(self.job.stack(rank)),
                )
            )
        return Outcome(self.job, ranks, time.monotonic() - self.began)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


def text_of(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except FileNotFoundError:
        return ""


def _error(file: Path) -> RankError | None:
    text = text_of(file)
    return RankError(**json.loads(text)) if text else None
