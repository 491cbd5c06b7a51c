"""Who belongs to a run, and what its members tell each other before they train."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest

from shardwise.compat.distributed import HashStore, PrefixStore, Store
from shardwise.errors import LaunchError
from shardwise.parallel.membership import About, NotAMember, call_roll, differences, opened, signed, space_of

KEY, OTHER = b"the key of this run", b"the key of another run"


def about(**config: object) -> About:
    return {
        "config": {"seed": 1, **config},
        "sources": {},
        "versions": {"Python": "3.11.7"},
        "devices": {"device": "cpu"},
    }


def test_only_who_has_the_key_can_make_change_or_move_a_message() -> None:
    message = signed(KEY, "about/3", b'{"seed": 1}')
    assert opened(KEY, "about/3", message) == b'{"seed": 1}'
    forged = [
        signed(OTHER, "about/3", b'{"seed": 1}'),
        signed(KEY, "about/2", b'{"seed": 1}'),  # said by another rank
        message.replace(b"1", b"2"),
        message[:-1],
        message + b" ",
        b'{"seed": 1}',
        b"",
        b"0" * 64 + b'{"seed": 1}',
    ]
    for each in forged:
        with pytest.raises(NotAMember):
            opened(KEY, "about/3", each)


def roll(members: dict[int, tuple[bytes, About]], size: int, patience: float = 20.0) -> dict[int, object]:
    """What each of them gets: the store, or its error."""
    store, answers, wait = HashStore(), dict[int, object](), timedelta(seconds=patience)
    store.set_timeout(wait)

    def member(rank: int) -> None:
        key, what = members[rank]
        try:
            answers[rank] = call_roll(store, key, rank, size, what, f"node{rank // 2}", "node0:29500", wait)
        except LaunchError as error:
            answers[rank] = error

    threads = [threading.Thread(target=member, args=(rank,)) for rank in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def test_ranks_that_run_the_same_get_a_store_of_their_own() -> None:
    answers = roll({rank: (KEY, about()) for rank in range(3)}, 3)
    stores = [each for each in answers.values() if isinstance(each, Store)]
    assert len(stores) == 3
    stores[0].set("a", "b")
    assert stores[2].get("a") == b"b"


def test_all_ranks_hear_which_of_them_differ_in_what_and_where() -> None:
    other = about(lr=0.01, name="y")
    answers = roll({0: (KEY, about(lr=0.001)), 1: (KEY, about(lr=0.001)), 2: (KEY, other), 3: (KEY, other)}, 4)
    assert len(answers) == 4
    for answer in answers.values():
        assert isinstance(answer, LaunchError)
        assert str(answer) == (
            "the ranks do not run the same:\n"
            "  lr: 0.001 on rank 0 (node0), 0.01 on ranks 2, 3 (node1)\n"
            '  name: not given on rank 0 (node0), "y" on ranks 2, 3 (node1)'
        )


def test_a_rank_with_another_key_is_not_heard_and_the_others_say_whom_they_miss() -> None:
    answers = roll({0: (KEY, about()), 1: (KEY, about()), 2: (OTHER, about())}, 3, patience=2.0)
    assert "nothing was heard of rank 2 at node0:29500" in str(answers[0])
    assert "nothing was heard of rank 0 at node0:29500" in str(answers[1])
    assert isinstance(answers[2], NotAMember) and "another run meets there" in str(answers[2])


def test_two_runs_that_meet_in_one_store_do_not_hear_each_other() -> None:
    store = HashStore()
    assert space_of(KEY) != space_of(OTHER)
    one = call_roll(store, KEY, 0, 1, about(), "node0", "node0:29500")
    for rank in (0, 1):
        with pytest.raises(NotAMember, match="another run meets there"):
            call_roll(store, OTHER, rank, 2, about(seed=2), "node7", "node0:29500")
    one.set("a", "1")
    assert one.get("a") == b"1"


def test_what_a_stranger_writes_under_the_name_of_a_rank_is_an_error_that_says_so() -> None:
    store = HashStore()
    PrefixStore(space_of(KEY), store).set("about/1", "{}")
    with pytest.raises(
        NotAMember, match="node0:29500: what says to be of rank 1 is not signed with the key of this run"
    ):
        call_roll(store, KEY, 0, 2, about(), "node0", "node0:29500")


def test_a_module_or_package_that_only_one_has_loaded_is_no_difference_but_a_missing_key_is_one() -> None:
    one, other = about(lr=1.0), about()
    one["versions"]["pandas"], other["sources"]["mine"] = "2.0", "abc"
    assert differences(one, other) == [("lr", "1.0", "not given")]
    other["versions"]["pandas"] = "2.1"
    assert differences(one, other)[0] == ("pandas", '"2.0"', '"2.1"')


def test_many_differences_are_counted_and_a_long_value_is_cut() -> None:
    answers = roll({0: (KEY, about()), 1: (KEY, about(**{f"key{n}": "x" * 1000 for n in range(9)}))}, 2)
    said = str(answers[0])
    assert said.count("\n") == 6 and said.endswith("and 4 more")
    assert max(map(len, said.splitlines())) < 250


def test_a_secret_is_compared_and_not_told() -> None:
    one, other = about(api_key={"hidden": "1a"}), about(api_key={"hidden": "2b"})
    assert differences(one, other) == [("api_key", "***", "***")]
    assert not differences(one, about(api_key={"hidden": "1a"}))
