"""What launchers share through a store: signed, and JSON, in the place of torchrun's backend, which unpickles what it finds."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from datetime import datetime, timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token

from shardwise.compat.distributed import Store
from shardwise.compat.elastic import NodeDesc, RendezvousState
from shardwise.parallel.membership import opened, signed

STATE = "state"


@dataclass(frozen=True)
class Node(NodeDesc):
    """A launcher, among those that meet."""

    came: int
    """Its turn: how many had come when it had; 0: it hosts the rendezvous."""

    def __lt__(self, other: NodeDesc) -> bool:
        return isinstance(other, Node) and self.came < other.came


class SignedStore(Store):
    """A store whose values nobody can make or change who has not the key. For launchers alone: threads of NCCL and gloo use a
    store while they hold what Python needs. Counters are numbers, and have no signature."""

    timeout: timedelta  # of the base, which does not say so to mypy

    def __init__(self, inner: Store, key: bytes, timeout: timedelta) -> None:
        super().__init__()
        self.inner, self._key = inner, key
        self.set_timeout(timeout)

    def set(self, name: str, value: str | bytes) -> None:
        content = value.encode() if isinstance(value, str) else bytes(value)
        self.inner.set(name, signed(self._key, name, content).decode("latin-1"))

    def get(self, name: str) -> bytes:
        self.inner.wait([name], self.timeout)
        return opened(self._key, name, self.inner.get(name))

    def add(self, name: str, number: int) -> int:
        return self.inner.add(name, number)

    def wait(self, names: Sequence[str], timeout: timedelta | None = None) -> None:
        self.inner.wait(list(names), timeout or self.timeout)

    def check(self, names: Sequence[str]) -> bool:
        return self.inner.check(list(names))

    def delete_key(self, name: str) -> bool:
        return self.inner.delete_key(name)


class SharedState(RendezvousBackend):
    """The state of the rendezvous in the store. torchrun's holder pickles its own state and unpickles what it is given: both
    within this process. JSON lies in between."""

    def __init__(self, store: Store, key: bytes) -> None:
        self._store, self._key = store, key

    @property
    def name(self) -> str:
        return "shardwise"

    def get_state(self) -> tuple[bytes, Token] | None:
        try:
            if not self._store.check([STATE]):
                return None
            kept = self._store.get(STATE)
        except (dist.DistError, ValueError) as error:
            raise RendezvousConnectionError(f"the rendezvous does not answer: {error}") from error
        return self._understood(kept), kept

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        wanted = signed(self._key, STATE, json.dumps(_as_plain(pickle.loads(state))).encode()).decode()
        try:
            kept = self._store.compare_set(STATE, token.decode() if isinstance(token, bytes) else "", wanted)
        except (dist.DistError, ValueError) as error:
            raise RendezvousConnectionError(f"the rendezvous does not answer: {error}") from error
        return self._understood(kept), kept, kept == wanted.encode()

    def _understood(self, kept: bytes) -> bytes:
        try:
            return pickle.dumps(_from_plain(json.loads(opened(self._key, STATE, kept))))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RendezvousStateError(f"the state of the rendezvous cannot be read: {error!r}") from error


def _as_plain(state: RendezvousState) -> dict[str, Any]:
    return {
        "round": state.round,
        "complete": state.complete,
        "closed": state.closed,
        "deadline": None if state.deadline is None else state.deadline.isoformat(),
        "participants": [[astuple(node), rank] for node, rank in state.participants.items()],
        "wait_list": [astuple(node) for node in state.wait_list],
        "redundancy_list": [astuple(node) for node in state.redundancy_list],
        "last_heartbeats": [[astuple(node), when.isoformat()] for node, when in state.last_heartbeats.items()],
    }


def _from_plain(plain: dict[str, Any]) -> RendezvousState:
    state = RendezvousState()
    state.round, state.complete, state.closed = int(plain["round"]), bool(plain["complete"]), bool(plain["closed"])
    state.deadline = None if plain["deadline"] is None else datetime.fromisoformat(plain["deadline"])
    state.participants = {_node(node): int(rank) for node, rank in plain["participants"]}
    state.wait_list = {_node(node) for node in plain["wait_list"]}
    state.redundancy_list = {_node(node) for node in plain["redundancy_list"]}
    state.last_heartbeats = {_node(node): datetime.fromisoformat(when) for node, when in plain["last_heartbeats"]}
    return state


def _node(plain: Sequence[Any]) -> Node:
    address, pid, local_id, came = plain
    return Node(str(address), int(pid), int(local_id), int(came))
