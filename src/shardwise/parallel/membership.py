"""Who may join a run, and whether all of its members run the same.

What travels before ranks know each other is JSON with a signature by the run's key: nothing of it is executed, and whoever has
not the key is not heard. The first thing that each member says is what it runs: config, sources, versions, devices.
"""

from __future__ import annotations

import hmac
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from shardwise.compat.distributed import PrefixStore, Store
from shardwise.errors import LaunchError, one_line

SHOWN = 5
"""Differences that an error lists."""
LONGEST = 16 * 2**20
"""Bytes of one message. A config and the names of some thousand sources are far fewer."""
OWNER = "shardwise-run"
"""The name under which a store says whose it is."""
ANSWER = timedelta(minutes=5)
"""How long the first rank is waited for where somebody has answered: all ranks of a job start at about the same time."""

About = dict[str, dict[str, Any]]
"""What a member runs: by kind (config, sources, versions, devices), then by name."""


@dataclass(frozen=True)
class Member:
    key: bytes
    """That of the run: whoever has it belongs to it."""
    about: About


class NotAMember(LaunchError):
    """What came is not signed with the key of this run."""


def signed(key: bytes, name: str, value: bytes) -> bytes:
    """`value` as it is kept under `name`: nobody who has not the key can make it, or move it to another name."""
    return hmac.digest(key, f"{name}\0".encode() + value, "sha256").hex().encode() + value


def opened(key: bytes, name: str, kept: bytes) -> bytes:
    """The value of what `signed` made. Raises NotAMember."""
    value = kept[64:]
    if len(kept) > LONGEST or not hmac.compare_digest(kept, signed(key, name, value)):
        raise NotAMember("what came over the network is not signed with the key of this run")
    return value


def space_of(key: bytes) -> str:
    """A name that runs with other keys do not use: two that meet in one store by accident do not touch each other."""
    return f"shardwise-{hmac.digest(key, b'space', 'sha256').hex()[:16]}"


def take_or_read(store: Store, key: bytes, said: Any, where: str) -> Any:
    """What the first member has said that has come here: `said`, if it is this one."""
    kept = store.compare_set(OWNER, "", signed(key, OWNER, json.dumps(said).encode()).decode())
    try:
        return json.loads(opened(key, OWNER, kept))
    except NotAMember:
        raise NotAMember(_another_run(where)) from None


def _another_run(where: str) -> str:
    return (
        f"{where}: another run meets there, or one with another run folder. Choose another port, or give all machines of this "
        "run the same folder"
    )


def call_roll(
    store: Store,
    key: bytes,
    rank: int,
    size: int,
    about: About,
    machine: str,
    where: str,
    to_answer: timedelta = ANSWER,
) -> Store:
    """Every rank says what it runs, the first compares. Raises LaunchError on all of them where they differ.

    `where`: the address at which they meet, for messages. Returns the part of the store that is this run's alone.
    """
    own = PrefixStore(space_of(key), store)
    if rank == 0:
        take_or_read(store, key, True, where)
    else:
        _wait(store, OWNER, "rank 0", where, to_answer)
        _read(store, key, OWNER, _another_run(where))
    _put(own, key, f"about/{rank}", {"machine": machine, "about": about})
    if rank == 0:
        told = {other: _get(own, key, f"about/{other}", f"rank {other}", where) for other in range(size)}
        _put(own, key, "answer", _differences_of_ranks(told))
    if differences := _get(own, key, "answer", "rank 0", where):
        raise LaunchError(refusal("the ranks do not run the same", differences))
    return own


def refusal(what: str, differences: Sequence[str]) -> str:
    more = f"\n  and {len(differences) - SHOWN} more" if len(differences) > SHOWN else ""
    return f"{what}:\n  " + "\n  ".join(differences[:SHOWN]) + more


def differences(one: About, other: About) -> list[tuple[str, str, str]]:
    """What two members run otherwise: its name in words, and what each of them has."""
    found = []
    for kind in ("versions", "sources", "config", "devices"):
        has, differs = one.get(kind, {}), other.get(kind, {})
        # A package or a module that only one of them has loaded yet is no difference.
        names = has.keys() | differs.keys() if kind == "config" else has.keys() & differs.keys()
        for name in sorted(names):
            if has.get(name) != differs.get(name):
                found.append((name, _shown(kind, has, name), _shown(kind, differs, name)))
    return found


def _shown(kind: str, values: Mapping[str, Any], name: str) -> str:
    if kind == "sources":
        return f"contents {str(values[name])[:8]}"
    if name not in values:
        return "not given"
    value = values[name]
    if isinstance(value, dict) and set(value) == {"hidden"}:  # a secret: only whether it is the same may be told
        return "***"
    return one_line(json.dumps(value, ensure_ascii=False), 80)


def _differences_of_ranks(told: Mapping[int, Any]) -> list[str]:
    """Compared with the first, in words; ranks that say the same stand together."""
    first = told[0]
    by_words: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for rank, said in told.items():
        for difference in differences(first["about"], said["about"]):
            by_words[difference].append(rank)
    return [
        f"{name}: {here} on rank 0 ({first['machine']}), {there} on {_ranks(others)} ({told[others[0]]['machine']})"
        for (name, here, there), others in by_words.items()
    ]


def _ranks(numbers: Sequence[int]) -> str:
    few = ", ".join(map(str, numbers[:4])) + (f" and {len(numbers) - 4} more" if len(numbers) > 4 else "")
    return f"rank{'s' if len(numbers) > 1 else ''} {few}"


def _put(store: Store, key: bytes, name: str, value: Any) -> None:
    store.set(name, signed(key, name, json.dumps(value).encode()).decode())


def _get(store: Store, key: bytes, name: str, whose: str, where: str) -> Any:
    _wait(store, name, whose, where)
    return _read(store, key, name, f"{where}: what says to be of {whose} is not signed with the key of this run")


def _wait(store: Store, name: str, whose: str, where: str, patience: timedelta | None = None) -> None:
    try:
        store.wait([name], *([] if patience is None else [patience]))
    except dist.DistError as error:
        raise LaunchError(f"nothing was heard of {whose} at {where}: {one_line(error)}") from None


def _read(store: Store, key: bytes, name: str, otherwise: str) -> Any:
    try:
        return json.loads(opened(key, name, store.get(name)))
    except NotAMember:
        raise NotAMember(otherwise) from None
