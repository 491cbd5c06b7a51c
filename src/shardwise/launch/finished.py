"""How ranks that are done wait for each other to be done, such that one which is killed meanwhile keeps nobody waiting.

torchrun's agent has its ranks wait for an Event. `set` of one waits until all who wait have woken up: for ever, where one of
them has died (torch 2.13 says so in a comment).
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.elastic import multiprocessing as elastic


class Finished:
    """In the place of the Event. Each who waits takes one of as many tickets as there are ranks."""

    def __init__(self, ranks: int, start_method: str) -> None:
        self._ranks = ranks
        self._tickets = multiprocessing.get_context(start_method).Semaphore(0)

    def wait(self) -> None:
        self._tickets.acquire()

    def set(self) -> None:
        for _ in range(self._ranks):
            self._tickets.release()


@contextmanager
def ranks_that_finish() -> Iterator[None]:
    """Ranks that the agent starts within it wait so."""
    before: Any = elastic.MultiprocessContext

    class Context(before):
        def _start(self) -> None:
            self._worker_finished_event = Finished(self.nprocs, self.start_method)
            super()._start()

    elastic.MultiprocessContext = Context  # type: ignore[misc]
    try:
        yield
    finally:
        elastic.MultiprocessContext = before  # type: ignore[misc]
