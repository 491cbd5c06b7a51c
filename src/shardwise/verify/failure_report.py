"""A group of ranks that did not come to its end: which rank, where, and why."""

from __future__ import annotations

import re
import time

from shardwise.errors import one_line
from shardwise.verify.causes import Cause
from shardwise.verify.groups import GroupResult
from shardwise.verify.report import Finding
from shardwise.watch.diagnosis import Kind, verdict_on
from shardwise.watch.failures import RankError

_MISMATCH = ("Detected mismatch between collectives", "monitoredBarrier", "Collectives differ", "op.preamble.length")
_OF_FSDP = ("ALLGATHER_BASE", "REDUCE_SCATTER_BASE")
_NO_GRADIENT = "got no gradient"


def trouble_of(group: GroupResult, *, trains_alone: bool = False) -> Finding:
    """The most telling of what its ranks left behind. `trains_alone`: in one process every parameter has a gradient."""
    first = group.first_error()
    if first is not None and not first.peer_lost and not _is_mismatch(first):
        return _failed(group, trains_alone)
    return _one_left_early(group) or _mismatched(group) or _hung(group) or _failed(group, trains_alone)


def _failed(group: GroupResult, trains_alone: bool) -> Finding:
    verdict = verdict_on(group.ranks, group.spec.world, time.monotonic())
    text, rank = f"{group.spec.name}: {verdict.sentence}", verdict.guilty[0] if verdict.guilty else None
    without = [each.rank for each in group.ranks if each.error and _NO_GRADIENT in each.error.message]
    if rank not in without:
        return Finding(Cause.RANK_FAILED, text, rank=rank)
    if trains_alone and len(without) < len(group.ranks):
        text += f"\nOnly rank {', '.join(map(str, without))} found none; in one process every parameter gets a gradient"
        return Finding(Cause.ONE_SIDED_PARAMETER, text, rank=rank, step=1)
    return Finding(Cause.DETACHED_PARAMETER, text, rank=rank)


def _one_left_early(group: GroupResult) -> Finding | None:
    made = [len(steps) for steps in group.steps]
    left = [each.rank for each in group.ranks if each.exit_code == 0]
    others = [each for each in group.ranks if each.exit_code != 0]
    if not left or not others:
        return None
    early, late = min(left, key=lambda rank: made[rank]), max(others, key=lambda each: made[each.rank])
    place = f" ({late.stack.place.place})" if late.stack.place else ""
    text = (
        f"{group.spec.name}: rank {early} ended after step {made[early]}; rank {late.rank} waited for it in step "
        f"{made[late.rank] + 1}{place}"
    )
    return Finding(Cause.BRANCHES_DIFFER, text, rank=early, step=made[early])


def _mismatched(group: GroupResult) -> Finding | None:
    error = next((each.error for each in group.ranks if each.error and _is_mismatch(each.error)), None)
    if error is None:
        return None
    step = len(group.steps[error.rank]) + 1
    text = f"{group.spec.name}: rank {error.rank}, in step {step}: {_calls(error.message)}"
    if any(call in error.message for call in _OF_FSDP):
        text += (
            ".\nfsdp gathers a block whenever it runs and reduces the gradients of what it used: probably the ranks did "
            "not run the same blocks, or not with the same parameters"
        )
    return Finding(Cause.COLLECTIVE_MISMATCH, text, rank=error.rank, step=step)


def _is_mismatch(error: RankError) -> bool:
    return any(mark in error.message for mark in _MISMATCH)


def _calls(message: str) -> str:
    """What each rank called, as PyTorch says it."""
    calls = re.findall(
        r"Rank (\d+) is running collective: .*?OpType=(\w+)(?:, TensorShape=\[([\d, ]*)\], TensorDtypes=(\w+))?",
        message,
    )
    if len(calls) < 2:
        return one_line(message, 600)
    return "; ".join(f"rank {r} calls {op.lower()} of shape [{shape}], type {kind}" for r, op, shape, kind in calls[:2])


def _hung(group: GroupResult) -> Finding | None:
    hang = group.hang
    if hang is None:
        return None
    cause = Cause.COLLECTIVE_MISMATCH if hang.kind is Kind.MISMATCH else Cause.HANG
    rank = hang.guilty[0] if hang.guilty else None
    return Finding(cause, f"{group.spec.name}: no sign of life: {hang.sentence}", rank=rank, step=hang.step)
