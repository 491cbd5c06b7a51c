"""Ranks of this machine for a few seconds each, forked from the server. Nobody starts them again: what became of them is for
whoever asked for them to judge. The launcher's ranks, which are started again, are the agent's."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from shardwise.launch.rank import rank_main
from shardwise.watch.diagnosis import Sighting, Verdict
from shardwise.watch.run_key import GIVEN, new_key
from shardwise.watch.watchdog import Watchdog

TO_PREPARE = 900.0
"""Seconds that ranks may be silent before the first step: data may have to be downloaded."""
ALONE = 8.0
"""Seconds that a rank may be silent when another of its group has ended: it can only wait for it."""


class RankGroup:
    def __init__(
        self,
        entry: Callable[..., int],
        args: tuple[Any, ...],
        ranks: int,
        folder: Path,
        hang_timeout: float,
        environment: Mapping[str, str] | None = None,
        hash_seeds: Sequence[int] = (),
    ) -> None:
        """`entry(*args)` in new processes, which beat, print and write their errors into `folder`. `hash_seeds`: of each rank,
        which then is an interpreter of its own. All that are forked from the server have the same one."""
        folder.mkdir(parents=True, exist_ok=True)
        self.hang_timeout = hang_timeout
        self.hang: Verdict | None = None
        """On ranks that hung and were ended for it."""
        self._watchdog = Watchdog(folder, folder, hang_timeout)
        self._ended: dict[int, tuple[int, float]] = {}
        """Exit code of ranks that ended by themselves, and when that was noticed."""
        self._looked_at = 0.0
        shared = {**os.environ, **(environment or {})}
        places = [shared | place for place in _places(ranks)]
        everything = [(entry, args, place, folder, Path.cwd()) for place in places]
        self._processes = list(_interpreters(everything, hash_seeds) if hash_seeds else _forked(everything))

    def ended(self) -> bool:
        """Asked again and again. Ranks that hang are asked where they are, and ended."""
        for rank, process in enumerate(self._processes):
            if process.exitcode is not None and rank not in self._ended:
                self._ended[rank] = process.exitcode, time.time()
        if len(self._ended) == len(self._processes):
            return True
        if time.monotonic() - self._looked_at < min(1.0, self.hang_timeout / 4):
            return False
        self._watchdog.hang_timeout = self._patience()
        self.hang = self._watchdog.look()
        self._looked_at = time.monotonic()
        if self.hang is not None:
            self.end()
        return self.hang is not None

    def _patience(self) -> float:
        alone = min(ALONE, self.hang_timeout)
        if self._ended and time.time() - max(when for _, when in self._ended.values()) > alone:
            return alone
        begun = any(not beat.phase.startup for beat in self._watchdog.living().values())
        return self.hang_timeout if begun else max(TO_PREPARE, self.hang_timeout)

    def end(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join()

    def sightings(self) -> list[Sighting]:
        """What is known of each rank, when all have ended. One that was ended from here has no exit code."""
        seen = {each.rank: each for each in self._watchdog.sightings(self._ended)}
        return [seen.get(rank, Sighting(rank)) for rank in range(len(self._processes))]


def _forked(everything: Iterable[tuple[Any, ...]]) -> Iterator[BaseProcess]:
    for each in everything:
        process = multiprocessing.get_context("forkserver").Process(target=_run, args=each)
        process.start()
        yield process


def _interpreters(everything: Iterable[tuple[Any, ...]], hash_seeds: Sequence[int]) -> Iterator[BaseProcess]:
    before = os.environ.get("PYTHONHASHSEED")
    try:
        for each, seed in zip(everything, hash_seeds, strict=True):
            os.environ["PYTHONHASHSEED"] = str(seed)
            process = multiprocessing.get_context("spawn").Process(target=_run, args=each)
            process.start()
            yield process
    finally:
        os.environ.pop("PYTHONHASHSEED")
        if before is not None:
            os.environ["PYTHONHASHSEED"] = before


def log_file(folder: Path, rank: int) -> Path:
    """What a rank has printed."""
    return folder / f"rank-{rank:04d}.log"


def _places(ranks: int) -> list[dict[str, str]]:
    """By rank, as torchrun says it. One that is alone meets nobody."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), GIVEN: new_key()} if ranks > 1 else {}
    return [{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), **meeting} for rank in range(ranks)]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _run(entry: Callable[..., int], args: tuple[Any, ...], environ: dict[str, str], folder: Path, cwd: Path) -> None:
    """In the rank's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its ranks
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(cwd)
    with log_file(folder, int(environ["RANK"])).open("a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    code = rank_main(entry, args, str(folder), 0)
    sys.stdout.flush()
    os._exit(code)  # what the program left behind, such as loader workers, must not keep the rank
