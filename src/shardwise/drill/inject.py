"""Inside a rank: does what it is ordered to, and writes down when each step was made.

An order is a file. The rank looks for one before every step, and takes it away before it obeys: a fault comes once. One that
damages a checkpoint stays until there are two.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shardwise.checkpoint import Saver
from shardwise.config.load import config_from_values
from shardwise.data import StepBatch
from shardwise.drill.faults import Kind
from shardwise.drill.network import pull_the_cable
from shardwise.engine.fit import fit
from shardwise.engine.observers import Observer, observing
from shardwise.engine.run import Run
from shardwise.engine.step_result import StepResult

SIGNALS = {Kind.KILL: signal.SIGKILL, Kind.PAUSE: signal.SIGSTOP, Kind.CRASH: signal.SIGSEGV}
SLOW_STEPS, SLOW_SECONDS = 4, 0.25


def rank(config: Mapping[str, Any], scratch: str) -> int:
    """What a rank of a drill runs: the user's training, and nothing in its way but the orders."""
    with observing(Orders(Path(scratch))):
        fit(config_from_values(config), resume="auto")
    return 0


class Orders(Observer):
    def __init__(self, scratch: Path) -> None:
        self.scratch, self.rank = scratch, int(os.environ["RANK"])
        self.slow = 0
        self._tell("began")

    def before_step(self, run: Run, batch: StepBatch) -> None:
        file = self.scratch / f"order-{self.rank}.json"
        if file.exists():
            order = json.loads(file.read_text())
            if Kind(order["kind"]) not in (Kind.CUT, Kind.FLIP) or _may_lose_one(run):
                file.unlink()
                self._obey(run, order["number"], Kind(order["kind"]), float(order["moment"]))
        if self.slow:
            self.slow -= 1
            time.sleep(SLOW_SECONDS)

    def after_step(self, run: Run, batch: StepBatch, result: StepResult) -> None:
        self._tell("stepped", step=result.step, epoch=batch.epoch, ids=batch.ids)

    def _obey(self, run: Run, number: int, kind: Kind, moment: float) -> None:
        def now() -> None:
            self._tell("fired", number=number, step=run.steps_done)

        saver = run.checkpoints.saver
        assert saver is not None  # there is one when steps are made
        if kind in SIGNALS:
            _later(moment, now, lambda: os.kill(os.getpid(), SIGNALS[kind]))
        elif kind is Kind.LINK:
            _later(moment, now, pull_the_cable)
        elif kind is Kind.ERROR:
            now()
            raise RuntimeError(f"fault {number} of the drill")
        elif kind is Kind.HANG:
            now()
            time.sleep(1e6)
        elif kind is Kind.SKIP:
            now()
            run.world.sum(1, 0, 0)  # the others take it for the agreement on the step, which this rank then makes alone
        elif kind is Kind.SAVE:
            _kill_while_saving(saver, now, before_the_rename=self.rank == 0 and moment > 0.5)
        elif kind in (Kind.CUT, Kind.FLIP):
            now()
            _damage(run, kind, moment)
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind is Kind.FULL:
            _no_space_once(saver, now)
        elif kind is Kind.SLOW:
            now()
            self.slow = SLOW_STEPS

    def _tell(self, what: str, **more: Any) -> None:
        record = {"what": what, "rank": self.rank, "pid": os.getpid(), "time": time.monotonic(), **more}
        with (self.scratch / f"rank-{self.rank}.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")


def _later(moment: float, now: Callable[[], None], do: Callable[[], None]) -> None:
    """In the middle of a step, of whatever it happens to do."""

    def strike() -> None:
        now()
        do()

    timer = threading.Timer(0.15 * moment, strike)
    timer.daemon = True
    timer.start()


def _kill_while_saving(saver: Saver, now: Callable[[], None], *, before_the_rename: bool) -> None:
    """Otherwise when the files are written, and nothing is flushed or named yet."""

    def killed(phase: str) -> None:
        if phase == ("commit" if before_the_rename else "flush"):
            now()
            os.kill(os.getpid(), signal.SIGKILL)

    saver.on_phase = killed


def _no_space_once(saver: Saver, now: Callable[[], None]) -> None:
    def full(phase: str) -> None:
        saver.on_phase = lambda phase: None
        now()
        raise OSError(errno.ENOSPC, "No space left on device")

    saver.on_phase = full  # the first phase is that of writing


def _may_lose_one(run: Run) -> bool:
    """A run whose checkpoints are all damaged stops, as it should, and with it the drill: there must be another."""
    return len(run.checkpoints.store.every()) > 1


def _damage(run: Run, kind: Kind, moment: float) -> None:
    run.wait()
    every = run.checkpoints.store.every()
    files = sorted(every[-1].path.glob("*.safetensors"))
    file = files[int(moment * len(files))]
    size = file.stat().st_size
    with file.open("r+b") as stream:
        if kind is Kind.CUT:
            stream.truncate(int(moment * size))
            return
        stream.seek(min(size - 1, int(moment * size)))
        byte = stream.read(1)[0]
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte ^ 1 << int(moment * 8)]))
