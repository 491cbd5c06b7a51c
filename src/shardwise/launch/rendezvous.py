"""Where launchers meet: torchrun's rendezvous, but who came first is rank 0, and nobody waits for its answer.

torchrun orders machines by address, as text, and on one machine by process: a run's lines would move to another terminal when
a machine joins that comes before. And a launcher asks ten times a second whether another machine waits to join. Behind a cut
link there is no answer and no error either, as long as the kernel keeps trying (100 s seen, torch 2.13), and meanwhile nobody
would look after the ranks, which hang for the same reason.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from threading import Thread

from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend, create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousSettings,
    RendezvousTimeout,
)

from shardwise.compat.distributed import HashStore, Store
from shardwise.compat.elastic import NodeDesc, RendezvousStateHolder

ANSWER = 0.5
"""Seconds that an answer is waited for."""
MEMORY = "memory"
"""The store of a launcher that meets nobody."""
LAST_CALL = timedelta(seconds=3)
"""When there are enough machines, another is waited for only a moment."""
KEEP_ALIVE = timedelta(seconds=2)
"""A machine that is gone is missed after three times as long."""


def join_rendezvous(where: RendezvousParameters) -> Rendezvous:
    """`store_type` memory: this launcher is alone, and opens no port. A file would do, but where there is no room for what is
    written to it, FileStore tries for ever (torch 2.13)."""
    backend, store = _in_memory(where.run_id) if where.get("store_type") == MEMORY else create_backend(where)
    came = 0 if where.get_as_bool("is_host") else store.add(f"shardwise.{where.run_id}.came", 1)
    node = Node(where.local_addr or socket.getfqdn(), os.getpid(), 0, came)
    settings = RendezvousSettings(
        where.run_id,
        where.min_nodes,
        where.max_nodes,
        RendezvousTimeout(last_call=LAST_CALL),
        keep_alive_interval=KEEP_ALIVE,
        keep_alive_max_attempt=3,
    )
    return Rendezvous(node, settings, backend.name, store, RendezvousStateHolder(backend, settings))


def _in_memory(job: str) -> tuple[C10dRendezvousBackend, Store]:
    store = HashStore()
    return C10dRendezvousBackend(store, job), store


@dataclass(frozen=True)
class Node(NodeDesc):
    """A launcher, among those that meet."""

    came: int
    """Its turn: how many had come when it had; 0: it hosts the rendezvous."""

    def __lt__(self, other: NodeDesc) -> bool:
        return isinstance(other, Node) and self.came < other.came


class Rendezvous(DynamicRendezvousHandler):
    _question: _Question | None = None
    """One that has not been answered yet."""

    def num_nodes_waiting(self) -> int:
        """None, as far as is known, while there is no answer."""
        if self._question is None:
            self._question = _Question(super().num_nodes_waiting)
        self._question.join(ANSWER)
        if self._question.is_alive():
            return 0
        question, self._question = self._question, None
        return question.answer

    def next_rendezvous(self) -> RendezvousInfo:
        if self._question is not None:  # it would change what is known while machines join
            self._question.join()
            self._question = None
        return super().next_rendezvous()


class _Question(Thread):
    """Asked in a thread of its own, which does not keep the program from ending."""

    def __init__(self, ask: Callable[[], int]) -> None:
        super().__init__(daemon=True)
        self._ask, self._answer = ask, 0
        self._error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self._answer = self._ask()
        except Exception as error:
            self._error = error

    @property
    def answer(self) -> int:
        if self._error is not None:
            raise self._error
        return self._answer
