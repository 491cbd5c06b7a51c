"""Inside a rank: does what it is ordered to, and writes down when each step was made.

An order is a file. The rank looks for one before every step, and takes it away before it obeys: a fault comes once.
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
from unittest.mock import patch

from shardwise.checkpoint import state, store
from shardwise.config.load import config_from_values
from shardwise.data import StepBatch
from shardwise.drill.faults import Kind
from shardwise.drill.network import pull_the_cable
from shardwise.engine.fit import fit
from shardwise.engine.session import Session
from shardwise.engine.step import StepResult

SIGNALS = {Kind.KILL: signal.SIGKILL, Kind.PAUSE: signal.SIGSTOP, Kind.CRASH: signal.SIGSEGV}
SLOW_STEPS, SLOW_SECONDS = 4, 0.25


def rank(config: Mapping[str, Any], scratch: str) -> int:
    """What a rank of a drill runs: the user's training, and nothing in its way but the orders."""
    _Orders(Path(scratch)).follow()
    fit(config_from_values(config), resume="auto")
    return 0


class _Orders:
    def __init__(self, scratch: Path) -> None:
        self.scratch, self.rank = scratch, int(os.environ["RANK"])
        self.slow = 0
        self._tell("began")

    def follow(self) -> None:
        step = Session.step

        def watched(session: Session, batch: StepBatch) -> StepResult:
            self._obey(session)
            if self.slow:
                self.slow -= 1
                time.sleep(SLOW_SECONDS)
            result = step(session, batch)
            self._tell("stepped", step=result.step, epoch=batch.epoch, ids=batch.ids)
            return result

        Session.step = watched  # type: ignore[method-assign]

    def _obey(self, session: Session) -> None:
        file = self.scratch / f"order-{self.rank}.json"
        if not file.exists():
            return
        order = json.loads(file.read_text())
        file.unlink()
        kind, moment = Kind(order["kind"]), float(order["moment"])

        def now() -> None:
            self._tell("fired", number=order["number"], step=session.steps_done)

        if kind in SIGNALS:
            _later(moment, now, lambda: os.kill(os.getpid(), SIGNALS[kind]))
        elif kind is Kind.LINK:
            _later(moment, now, pull_the_cable)
        elif kind is Kind.ERROR:
            now()
            raise RuntimeError(f"fault {order['number']} of the drill")
        elif kind is Kind.HANG:
            now()
            time.sleep(1e6)
        elif kind is Kind.SKIP:
            now()
            _skip_one(session)
        elif kind is Kind.SAVE:
            _kill_while_saving(now, before_the_rename=self.rank == 0 and moment > 0.5)
        elif kind in (Kind.CUT, Kind.FLIP):
            now()
            _damage(session, kind, moment)
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind is Kind.FULL:
            _no_space_once(now)
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


def _skip_one(session: Session) -> None:
    """The next collective on which the ranks agree takes place without this one."""
    world = session.world
    agree = type(world).sum

    def alone(*values: float) -> list[float]:
        world.sum = lambda *values: agree(world, *values)  # type: ignore[method-assign]
        return list(values)

    world.sum = alone  # type: ignore[method-assign]


def _kill_while_saving(now: Callable[[], None], *, before_the_rename: bool) -> None:
    def killed(*_: Any) -> None:
        now()
        os.kill(os.getpid(), signal.SIGKILL)

    if before_the_rename:
        patch.object(store, "write_manifest", killed).start()
    else:
        patch.object(os, "fsync", killed).start()  # the files are written then, and nothing is flushed or named yet


def _no_space_once(now: Callable[[], None]) -> None:
    def full(folder: Path, files: Any) -> Any:
        patched.stop()
        now()
        raise OSError(errno.ENOSPC, "No space left on device")

    patched = patch.object(state, "write_files", full)
    patched.start()


def _damage(session: Session, kind: Kind, moment: float) -> None:
    session.wait()
    every = session.store.every()
    if not every:
        return
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
