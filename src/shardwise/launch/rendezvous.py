"""Where launchers meet: torchrun's rendezvous, but only members of the run are heard, who came first is rank 0, and nobody waits
for its answer.

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

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousSettings,
    RendezvousTimeout,
)

from shardwise.compat.distributed import HashStore, PrefixStore, Store
from shardwise.compat.elastic import RendezvousStateHolder
from shardwise.errors import LaunchError
from shardwise.launch.shared_state import Node, SharedState, SignedStore
from shardwise.parallel.listening import PortInUse, tcp_store
from shardwise.parallel.membership import Member, differences, refusal, space_of, take_or_read

ANSWER = 0.5
"""Seconds that an answer is waited for."""
STORE_ANSWER = timedelta(seconds=60)
LAST_CALL = timedelta(seconds=3)
"""When there are enough machines, another is waited for only a moment."""
KEEP_ALIVE = timedelta(seconds=2)
"""A machine that is gone is missed after three times as long."""


@dataclass(frozen=True)
class MeetingPoint:
    """Where the launchers of a run meet, and how many."""

    host: str
    port: int
    hosts: bool | None
    """Whether this machine hosts it. None: whoever of those on this machine comes first."""

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def join_rendezvous(
    point: MeetingPoint | None, member: Member, address: str, least: int = 1, most: int = 1, job: str = "run"
) -> Rendezvous:
    """`point`: None where one machine is alone; then no port is opened. `address`: of this machine, as the others reach it.
    LaunchError: whoever is there does not belong to this run, or runs something else."""
    store: Store = HashStore()
    if point is not None:
        store = _open(point)
        _compare(store, point, member)
    own = PrefixStore(space_of(member.key), store)
    came = 0 if point is not None and point.hosts else own.add("came", 1)
    node = Node(address, os.getpid(), 0, came)
    settings = RendezvousSettings(
        job,
        least,
        most,
        RendezvousTimeout(last_call=LAST_CALL),
        keep_alive_interval=KEEP_ALIVE,
        keep_alive_max_attempt=3,
    )
    state, shared = SharedState(own, member.key), SignedStore(own, member.key, STORE_ANSWER)
    return Rendezvous(node, settings, state.name, shared, RendezvousStateHolder(state, settings))


def _open(point: MeetingPoint) -> Store:
    if point.hosts is not False:
        try:
            return tcp_store(point.host, point.port, hosts=True, timeout=STORE_ANSWER)
        except PortInUse:
            if point.hosts:
                raise
    try:
        return tcp_store(point.host, point.port, hosts=False, timeout=STORE_ANSWER)
    except LaunchError as error:
        raise LaunchError(
            f"--rendezvous {point}: {error}. Start the machine of that name first, or give it --node-host"
        ) from None


def _compare(store: Store, point: MeetingPoint, member: Member) -> None:
    """Who comes first says what the run is, and whoever comes later compares, before the others hear of it."""
    mine = {"machine": socket.gethostname(), "about": member.about}
    try:
        first = take_or_read(store, member.key, mine, f"--rendezvous {point}")
    except (dist.DistError, ValueError) as error:
        raise RendezvousConnectionError(f"the rendezvous {point} does not answer: {error}") from error
    found = differences(first["about"], member.about)
    if found:
        said = [f"{name}: {there} on {first['machine']}, {here} here" for name, there, here in found]
        raise LaunchError(refusal(f"--rendezvous {point}: this machine does not run what the run there runs", said))


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
