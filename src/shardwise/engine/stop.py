"""Asked to leave: by a signal, or because the time is up. A rank notes it; all ranks agree on it in the next collective.

The first signal asks, in whatever phase it comes; a second one leaves at once.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from shardwise.watch.exit_codes import AGAIN, INTERRUPTED, TIME_IS_UP

ASKED_BY = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
MARGIN = 0.05
"""Share of the time limit that is kept in reserve, up to MOST_MARGIN seconds."""
MOST_MARGIN = 30.0


class Stopped(BaseException):
    """Asked to leave before the first step: there is nothing to save."""


class Stop:
    def __init__(self, after: float | None = None, began: float | None = None) -> None:
        """`after`: seconds that the run may take, since `began` of the monotonic clock."""
        self.after = after
        self.began = time.monotonic() if began is None else began
        self.step_seconds = 0.0
        """Of the slowest of the last steps."""
        self.save_seconds = 0.0
        """Of the slowest checkpoint."""
        self._asked_at: float | None = None
        self._asked_by = 0
        self._can_save = False

    @property
    def exit_code(self) -> int:
        """Of this rank, when it has left before the end."""
        if self._asked_at is None and self._time_is_up():
            return TIME_IS_UP
        return INTERRUPTED if self._asked_by == signal.SIGINT else AGAIN

    @property
    def requested(self) -> bool:
        """This rank wants to leave before the next step."""
        return self._asked_at is not None or self._time_is_up()

    def _time_is_up(self) -> bool:
        if self.after is None:
            return False
        still_to_do = self.save_seconds + 2 * self.step_seconds + min(MARGIN * self.after, MOST_MARGIN)
        return time.monotonic() - self.began + still_to_do > self.after

    def stepped(self, seconds: float) -> None:
        self.step_seconds = max(seconds, 0.9 * self.step_seconds)

    def saved(self, seconds: float) -> None:
        self.save_seconds = max(seconds, self.save_seconds)

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
