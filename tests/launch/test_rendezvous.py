"""Where launchers meet: when it does not answer, and who is let in."""

from __future__ import annotations

import json
import pickle
import socket
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousStateError

from shardwise.compat.distributed import HashStore, TCPStore
from shardwise.compat.elastic import RendezvousState
from shardwise.errors import LaunchError
from shardwise.launch.rendezvous import MeetingPoint, Rendezvous, join_rendezvous
from shardwise.launch.shared_state import Node, SharedState, SignedStore
from shardwise.parallel.listening import PortInUse
from shardwise.parallel.membership import About, Member, NotAMember, signed, space_of

KEY = b"the key of this run"
ABOUT: About = {
    "config": {"training.optimizer.lr": 0.001},
    "sources": {},
    "versions": {"Python": "3.11.7"},
    "devices": {},
}


@pytest.fixture
def meeting() -> Rendezvous:
    return join_rendezvous(None, Member(KEY, {}), "127.0.0.1")


@pytest.fixture
def point() -> MeetingPoint:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return MeetingPoint("127.0.0.1", probe.getsockname()[1], None)


def come(point: MeetingPoint, about: About = ABOUT, key: bytes = KEY) -> Rendezvous:
    return join_rendezvous(point, Member(key, about), "127.0.0.1", 1, 4)


@pytest.mark.slow
def test_whoever_asks_is_not_held_up_by_a_cut_link_and_the_late_answer_counts(
    meeting: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder, link, asked = meeting._state_holder, Event(), []

    def sync() -> None:
        asked.append("who waits?")
        link.wait(timeout=60)
        holder.state.wait_list.add("another machine")  # type: ignore[arg-type]

    monkeypatch.setattr(holder, "sync", sync)
    assert [meeting.num_nodes_waiting(), meeting.num_nodes_waiting()] == [0, 0]
    assert len(asked) == 1, "it is not asked again before it has answered"
    link.set()
    assert meeting.num_nodes_waiting() == 1
    assert meeting.num_nodes_waiting() == 1 and len(asked) == 2


def test_an_error_reaches_the_one_who_asked(meeting: Rendezvous, monkeypatch: pytest.MonkeyPatch) -> None:
    def sync() -> None:
        raise RendezvousConnectionError("it is gone")

    monkeypatch.setattr(meeting._state_holder, "sync", sync)
    with pytest.raises(RendezvousConnectionError, match="it is gone"):
        meeting.num_nodes_waiting()


@pytest.mark.slow
def test_machines_join_only_when_the_last_question_is_answered(
    meeting: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer, which is of before, would otherwise overwrite what is known meanwhile."""
    holder, answered = meeting._state_holder, Event()
    sync = holder.sync

    def late() -> bool | None:
        monkeypatch.setattr(holder, "sync", sync)
        Event().wait(timeout=2)  # longer than the one who asked waits
        answered.set()
        return None

    monkeypatch.setattr(holder, "sync", late)
    assert meeting.num_nodes_waiting() == 0 and not answered.is_set()
    assert meeting.next_rendezvous().world_size == 1
    assert answered.is_set()
    meeting.shutdown()


def test_who_came_first_is_first_whatever_its_address_and_number(point: MeetingPoint) -> None:
    def node(address: str) -> Node:
        held.append(join_rendezvous(point, Member(KEY, ABOUT), address, 1, 4))
        came = held[-1]._this_node
        assert isinstance(came, Node)
        return came

    held: list[Rendezvous] = []
    nodes = [node("10.0.0.9"), node("10.0.0.10"), node("10.0.0.8")]
    host = Node("10.0.0.99", 1, 0, 0)
    assert [each.addr for each in sorted([*nodes, host])] == ["10.0.0.99", "10.0.0.9", "10.0.0.10", "10.0.0.8"]
    assert len(set(nodes)) == 3


# ---------------------------------------------------------------- who is let in


def test_the_state_that_launchers_share_survives_the_way_as_json() -> None:
    nodes = [Node(f"10.0.0.{number}", 100 + number, 0, number) for number in range(4)]
    state, now = RendezvousState(), datetime.now(UTC)
    state.round, state.complete, state.deadline = 3, True, now + timedelta(seconds=3)
    state.participants, state.wait_list, state.redundancy_list = {nodes[0]: 1, nodes[1]: 0}, {nodes[2]}, {nodes[3]}
    state.last_heartbeats = dict.fromkeys(nodes, now)
    shared = SharedState(HashStore(), KEY)
    assert shared.get_state() is None
    answer = shared.set_state(pickle.dumps(state))
    assert answer is not None and answer[2] is True
    found = shared.get_state()
    assert found is not None
    arrived = pickle.loads(found[0])
    assert vars(arrived) == vars(state)
    state.round = 4
    assert (late := shared.set_state(pickle.dumps(state))) is not None and late[2] is False, "it has no token"
    assert (right := shared.set_state(pickle.dumps(state), found[1])) is not None and right[2] is True


class Bomb:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


@pytest.mark.parametrize("signed_by", [None, b"another key"])
def test_nothing_that_a_stranger_puts_into_the_state_is_executed(
    tmp_path: Path, signed_by: bytes | None, point: MeetingPoint
) -> None:
    ours = come(point)
    stranger = TCPStore(point.host, point.port, None, False, timedelta(seconds=10), wait_for_workers=False)
    exploded = tmp_path / "exploded"
    bomb = pickle.dumps(Bomb(exploded))
    for name in (
        "state",
        "torch.rendezvous.run",
        f"{space_of(KEY)}/state",
    ):  # though nobody knows the last who has no key
        stranger.set(name, (bomb if signed_by is None else signed(signed_by, "state", bomb)).decode("latin-1"))
    with pytest.raises(NotAMember, match="not signed with the key of this run"):
        ours.next_rendezvous()
    assert not exploded.exists()


def test_a_state_of_a_member_that_is_none_is_an_error_for_a_person() -> None:
    store = HashStore()
    members = SignedStore(store, KEY, timedelta(seconds=5))
    for wrong in ("[]", "{}", "null", '{"round": "x"}', "not json", '{"round": 1, "complete": true}'):
        members.set("state", wrong)
        with pytest.raises(RendezvousStateError, match="cannot be read"):
            SharedState(store, KEY).get_state()


def test_another_run_at_the_same_address_is_refused_and_disturbs_nobody(point: MeetingPoint) -> None:
    ours = come(point)
    assert ours.next_rendezvous().world_size == 1
    with pytest.raises(NotAMember, match=rf"{point}: another run meets there"):
        come(point, key=b"another key")
    assert ours.num_nodes_waiting() == 0
    ours.shutdown()


def test_a_machine_that_runs_something_else_is_refused_with_both_values_and_disturbs_nobody(
    point: MeetingPoint,
) -> None:
    ours = come(point)
    assert ours.next_rendezvous().world_size == 1
    changed = json.loads(json.dumps(ABOUT))
    changed["config"]["training.optimizer.lr"] = 0.01
    changed["versions"]["Python"] = "3.12.1"
    with pytest.raises(LaunchError) as error:
        come(point, changed)
    assert f"training.optimizer.lr: 0.001 on {socket.gethostname()}, 0.01 here" in str(error.value)
    assert 'Python: "3.11.7"' in str(error.value) and '"3.12.1" here' in str(error.value)
    assert ours.num_nodes_waiting() == 0
    same = come(point)
    assert ours.num_nodes_waiting() == 0  # it has not asked to join yet
    same.shutdown()
    ours.shutdown()


def test_the_port_is_open_at_the_address_that_was_asked_for_alone(point: MeetingPoint) -> None:
    held = come(point)
    with socket.socket() as inside:
        inside.connect((point.host, point.port))
    for elsewhere in ("127.0.0.2", *_other_addresses()):
        with socket.socket() as outside, pytest.raises(ConnectionRefusedError):
            outside.connect((elsewhere, point.port))
    held.shutdown()


def _other_addresses() -> list[str]:
    found = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET, socket.SOCK_STREAM)
    return sorted({str(place[0]) for *_, place in found} - {"127.0.0.1"})


def test_a_port_that_another_program_has_is_an_error_that_says_so() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen(8)
        point = MeetingPoint("127.0.0.1", other.getsockname()[1], True)
        with pytest.raises(PortInUse, match="in use already"):
            come(point)
