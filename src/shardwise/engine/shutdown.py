"""Asked to leave: by a signal, or because the time is up. A rank notes it; all ranks agree on it in the next collective.

The first signal asks, in whatever phase it comes; a second one leaves at once.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from shardwise.checkpoint import Written
from shardwise.engine.observers import Observer
from shardwise.engine.run import Run
from shardwise.watch.exit_codes import AGAIN, INTERRUPTED, TIME_IS_UP

ASKED_BY = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
MARGIN = 0.05
"""Share of the time limit that is kept in reserve, up to MOST_MARGIN seconds."""
MOST_MARGIN = 30.0
CAUTIOUS = 100e6
"""Bytes per second that storage takes at the least, until the first checkpoint has shown it: a disk, a gigabit network."""


class Stopped(BaseException):
    """Asked to leave before the first step: there is nothing to save."""


def seconds_to_leave(after: float, step: float, save: float) -> float:
    """How long before the end a run with a limit of `after` seconds leaves: for a checkpoint, two steps and a reserve."""
    return save + 2 * step + min(MARGIN * after, MOST_MARGIN)


class Stop(Observer):
    def __init__(self, after: float | None = None, began: float | None = None) -> None:
        """`after`: seconds that the run may take, since `began` of the monotonic clock."""
        self.after = after
        self.began = time.monotonic() if began is None else began
        self.step_seconds = 0.0
        """Of the slowest of the last steps."""
        self.save_seconds: float | None = None
        """Of the slowest checkpoint; None: there has been none."""
        self.state_bytes = 0
        """What a checkpoint of the run will hold, about."""
        self._still_to_do = 0.0
        self._asked_at: float | None = None
        self._asked_by = 0
        self._can_save = False

    @property
    def exit_code(self) -> int:
        """Of this rank, when it has left before the end."""
        if self._asked_at is None and self._time_is_up():  # by what was known when this rank was last asked
            return TIME_IS_UP
        return INTERRUPTED if self._asked_by == signal.SIGINT else AGAIN

    @property
    def requested(self) -> bool:
        """This rank wants to leave before the next step."""
        if self.after is not None:
            save = self.state_bytes / CAUTIOUS if self.save_seconds is None else self.save_seconds
            self._still_to_do = seconds_to_leave(self.after, self.step_seconds, save)
        return self._asked_at is not None or self._time_is_up()

    def _time_is_up(self) -> bool:
        return self.after is not None and time.monotonic() - self.began + self._still_to_do > self.after

    def stepped(self, seconds: float) -> None:
        self.step_seconds = max(seconds, 0.9 * self.step_seconds)

    def saved(self, run: Run, written: Written) -> None:
        self.save_seconds = max(written.seconds, self.save_seconds or 0.0)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """From the beginning of a rank to its end."""
        under_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        numbers = [number for number in ASKED_BY if number != signal.SIGHUP or not under_nohup]
        before = {number: signal.signal(number, self._ask) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def able_to_save(self) -> Iterator[None]:
        """From now on a request waits for the next agreement of the ranks. Before, it ends the start-up."""
        self._can_save = True
        try:
            if self._asked_at is not None:
                raise Stopped
            yield
        finally:
            self._can_save = False

    def _ask(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._asked_at is not None:
            # One Ctrl-C may arrive twice: from the terminal and from the launcher.
            if now - self._asked_at > 0.5:
                raise KeyboardInterrupt
            return
        self._asked_at = now
        self._asked_by = number
        if not self._can_save:
            raise Stopped
