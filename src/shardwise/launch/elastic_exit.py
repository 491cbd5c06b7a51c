"""How ranks end under torchrun's agent, where its own way (torch 2.13) would not do.

Ranks that are done wait for each other by an Event. `set` of one waits until all who wait have woken up: for ever, where one of
them has died. And when one has died, all others are ended before anybody could see who else had.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import connection
from typing import Any

from torch.multiprocessing.spawn import ProcessContext

from shardwise.compat.elastic import starting_ranks_with


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


class Processes(ProcessContext):
    """The ranks. `one_died` is called while the others still are as that death has left them."""

    def __init__(self, processes: list[Any], error_files: list[str], one_died: Callable[[], None]) -> None:
        super().__init__(processes, error_files)
        self._one_died = one_died

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """Whether all have ended, and well. Raises when one has not."""
        if not self.sentinels:
            return True
        gone = connection.wait(self.sentinels.keys(), timeout=timeout)
        ended = [self.processes[self.sentinels[sentinel]] for sentinel in gone]
        for process in ended:
            process.join()
        if any(process.exitcode for process in ended):
            self._one_died()
            return super().join(timeout, grace_period)
        for sentinel in gone:
            del self.sentinels[sentinel]
        return not self.sentinels


@contextmanager
def ending_well(one_died: Callable[[], None]) -> Iterator[None]:
    """Ranks that the agent starts within it end so."""
    with starting_ranks_with(Finished, lambda processes, errors: Processes(processes, errors, one_died)):
        yield
