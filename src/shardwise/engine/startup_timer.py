"""What a start takes: the seconds from the beginning of the process to the first step, by what they were spent on."""

from __future__ import annotations

import os
import time

from shardwise.watch.procfs import age_of

WORTH_SAYING = 10.0
"""Seconds from which on a start is explained."""


class StartupTimer:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def of_a_program(self) -> None:
        """The process has begun in order to train: what it did before was to import."""
        if (age := age_of(os.getpid())) is not None:
            self.seconds = {"imports": max(0.0, age - sum(self.seconds.values())), **self.seconds}

    def lap(self, what: str) -> None:
        """The time since the last one went into this."""
        now = time.perf_counter()
        self.seconds[what] = self.seconds.get(what, 0.0) + now - self._last
        self._last = now

    def sentence(self) -> str | None:
        """Where it took long."""
        total = sum(self.seconds.values())
        if total < WORTH_SAYING:
            return None
        parts = [f"{what} {seconds:.1f}" for what, seconds in self.seconds.items() if seconds >= 0.05]
        return f"ready after {total:.1f} s: {', '.join(parts)}"
