"""Where launchers meet, when it does not answer."""

from __future__ import annotations

from pathlib import Path
from threading import Event

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

from shardwise.launch.rendezvous import Node, Rendezvous, join_rendezvous


@pytest.fixture
def meeting(tmp_path: Path) -> Rendezvous:
    return join_rendezvous(RendezvousParameters("c10d", str(tmp_path / "store"), "job", 1, 1, store_type="file"))


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


def test_who_came_first_is_first_whatever_its_address_and_number(tmp_path: Path) -> None:
    def come(address: str, **keeps: str) -> Node:
        where = RendezvousParameters(
            "c10d", str(tmp_path / "store"), "job", 1, 4, local_addr=address, store_type="file", **keeps
        )
        node = join_rendezvous(where)._this_node
        assert isinstance(node, Node)
        return node

    nodes = [come("10.0.0.9"), come("10.0.0.10"), come("10.0.0.8"), come("10.0.0.99", is_host="true")]
    assert [node.addr for node in sorted(nodes)] == ["10.0.0.99", "10.0.0.9", "10.0.0.10", "10.0.0.8"]
    assert len(set(nodes)) == 4
