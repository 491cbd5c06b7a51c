"""Whether every rank holds the same weights and took the same branches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from shardwise.verify.causes import Cause
from shardwise.verify.formatting import listed
from shardwise.verify.groups import GroupResult
from shardwise.verify.probe import Probe
from shardwise.verify.report import Check, Finding, failed, noted, passed

_passed, _noted, _failed = partial(passed, "agreement"), partial(noted, "agreement"), partial(failed, "agreement")


def check_agreement(ranks: GroupResult, probe: Probe) -> list[Check]:
    if len(ranks.ranks) == 1:
        return []
    return [*_weights(ranks), *_buffers(ranks), *_own_buffers(ranks, probe), *_branches(ranks)]


def _weights(ranks: GroupResult) -> Iterator[Check]:
    first = ranks.record(0)["weight_digests"]
    for rank, mine, different in _unlike(ranks, first, lambda record: record["weight_digests"]):
        steps = len(ranks.steps[rank])
        text = (
            f"after {steps} steps rank {rank} holds other weights than rank 0: {len(different)} of {len(mine)}, "
            f"{different[0]} first"
        )
        yield _failed("weights", Finding(Cause.SOME_RANKS_UPDATE, text, different[0], rank, steps))
        return
    same = f"{len(first)} parameters are the same on all {len(ranks.ranks)} ranks, bit for bit"
    yield _passed("weights", same)


def _buffers(ranks: GroupResult) -> Iterator[Check]:
    """At the checkpoint: buffers are those of rank 0 when they are saved or evaluated with."""
    first = ranks.record(0)["snapshots"]["saved"]["buffers"]
    for rank, _, different in _unlike(ranks, first, lambda record: record["snapshots"]["saved"]["buffers"]):
        step = ranks.record(0)["snapshots"]["saved"]["steps_done"]
        text = f"when step {step} is saved, rank {rank} has another {different[0]} than rank 0"
        yield _failed("buffers", Finding(Cause.STALE_BUFFERS, text, different[0], rank, step))
        return
    if first:
        same = f"{len(first)} running buffers are the same on all ranks when they are saved"
        yield _passed("buffers", same)


def _own_buffers(ranks: GroupResult, probe: Probe) -> Iterator[Check]:
    """After the first step, before anything is shared: buffers that each rank brought to a value of its own."""
    first: dict[str, tuple[int, str]] = {}
    different: dict[str, tuple[int, int]] = {}
    started_alike = _same_at_the_start(ranks)
    for rank, record in enumerate(ranks.records):
        for name, digest in record["buffers"].items():
            holder, theirs = first.setdefault(name, (rank, digest))
            if theirs != digest and name in started_alike:
                different.setdefault(name, (holder, rank))
    if not different:
        return
    deciding = [name for name in different if name in probe.buffers_in_gradient]
    name = (deciding or list(different))[0]
    holder, rank_number = different[name]
    text = (
        f"after step 1, {listed(deciding or list(different))} on rank {rank_number} is not that of rank {holder}: each follows "
        "the samples of its own rank"
    )
    if deciding:
        text += ", and a gradient changes with it"
        yield _failed("running buffers", Finding(Cause.OWN_BUFFERS, text, name, rank_number, 1))
        return
    text += (
        f". No gradient depends on it; what is evaluated with and saved is rank {holder}'s, of its own samples alone"
    )
    yield _noted("running buffers", text)


def _same_at_the_start(ranks: GroupResult) -> set[str]:
    found: dict[str, set[str]] = {}
    for record in ranks.records:
        for name, digest in record["constants"].items():
            found.setdefault(name, set()).add(digest)
    return {name for name, digests in found.items() if len(digests) == 1}


def _unlike(
    ranks: GroupResult, first: dict[str, Any], look: Callable[[dict[str, Any]], dict[str, Any]]
) -> Iterator[tuple[int, dict[str, Any], list[str]]]:
    """Ranks whose digests are not rank 0's: the rank, its digests, and the names that differ. What only they hold is theirs."""
    for rank, record in enumerate(ranks.records):
        mine = look(record)
        if different := [name for name in mine if first.get(name, mine[name]) != mine[name]]:
            yield rank, mine, different


def _branches(ranks: GroupResult) -> Iterator[Check]:
    first = ranks.steps[0]
    for rank, steps in enumerate(ranks.steps):
        for mine, expected in zip(steps, first, strict=False):
            for key in ("step", "epoch", "skipped", "stopped", "lr", "global_count"):
                if mine[key] != expected[key]:
                    text = f"step {mine['step']}: {key} is {mine[key]} on rank {rank} and {expected[key]} on rank 0"
                    cause = Cause.SCHEDULE if key == "lr" else Cause.BRANCHES_DIFFER
                    yield _failed("branches", Finding(cause, text, rank=rank, step=mine["step"]))
                    return
        if len(steps) != len(first):
            text = f"rank {rank} took {len(steps)} steps, rank 0 {len(first)}"
            yield _failed("branches", Finding(Cause.BRANCHES_DIFFER, text, rank=rank, step=len(steps)))
            return
    skipped = sum(row["skipped"] for row in first)
    text = f"{len(first)} steps on every rank, {skipped} skipped; every collective was matched by all ranks "
    yield _passed("branches", f"{text}(TORCH_DISTRIBUTED_DEBUG=DETAIL)")
