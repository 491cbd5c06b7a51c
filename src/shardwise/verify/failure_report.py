"""A group of ranks that did not come to its end: which rank, where, and why."""

from __future__ import annotations

import re

from shardwise.errors import one_line
from shardwise.verify.causes import Cause
from shardwise.verify.processes import Outcome, RankOutcome
from shardwise.verify.report import Finding
from shardwise.watch.failures import RankError

_MISMATCH = ("Detected mismatch between collectives", "monitoredBarrier", "Collectives differ", "op.preamble.length")
_OF_FSDP = ("ALLGATHER_BASE", "REDUCE_SCATTER_BASE")
_NO_GRADIENT = "got no gradient"


def trouble_of(outcome: Outcome, *, trains_alone: bool = False) -> Finding:
    """The most telling of what its ranks left behind. `trains_alone`: in one process every parameter has a gradient."""
    name = outcome.job.name
    hung = [rank for rank in outcome.ranks if rank.exit_code is None]
    errors = [rank.error for rank in outcome.ranks if rank.error]
    mismatched = next((error for error in errors if any(mark in error.message for mark in _MISMATCH)), None)
    first = outcome.first_error()
    if first is not None and not first.peer_lost and first is not mismatched and not _mismatch(first):
        words = first.message if first.for_user else _last_lines(first)
        text = f"{name}: rank {first.rank} failed {_where(outcome.ranks[first.rank])}: {words}"
        if _NO_GRADIENT not in first.message:
            return Finding(Cause.RANK_FAILED, text, rank=first.rank)
        same = [error.rank for error in errors if _NO_GRADIENT in error.message]
        if trains_alone and len(same) < len(outcome.ranks):
            text += (
                f"\nOnly rank {', '.join(map(str, same))} found none; in one process every parameter gets a gradient"
            )
            return Finding(Cause.ONE_SIDED_PARAMETER, text, rank=first.rank, step=1)
        return Finding(Cause.DETACHED_PARAMETER, text, rank=first.rank)
    left = [rank for rank in outcome.ranks if rank.exit_code == 0]
    others = [rank for rank in outcome.ranks if rank.exit_code != 0]
    if left and others:
        early = min(left, key=lambda rank: len(rank.steps))
        late = max(others, key=lambda rank: len(rank.steps))
        text = (
            f"{name}: rank {early.rank} ended after step {len(early.steps)}; rank {late.rank} was {_where(late)}, waiting for it"
            f"{_stack(late)}"
        )
        return Finding(Cause.BRANCHES_DIFFER, text, rank=early.rank, step=len(early.steps))
    if mismatched is not None:
        rank = outcome.ranks[mismatched.rank]
        text = f"{name}: rank {rank.rank}, {_where(rank)}: {_shortened(mismatched.message)}"
        if any(call in mismatched.message for call in _OF_FSDP):
            text += (
                ".\nfsdp gathers a block whenever it runs and reduces the gradients of what it used: probably the ranks did "
                "not run the same blocks, or not with the same parameters"
            )
        return Finding(Cause.COLLECTIVE_MISMATCH, text, rank=rank.rank, step=len(rank.steps) + 1)
    if hung:
        text = "; ".join(f"rank {rank.rank} {_where(rank)}{_stack(rank)}" for rank in hung)
        return Finding(
            Cause.HANG, f"{name}: no sign of life from {text}", rank=hung[0].rank, step=len(hung[0].steps) + 1
        )
    odd = next((rank for rank in outcome.ranks if not rank.fine), outcome.ranks[0])
    why = f": {_shortened(first.message)}" if first else ""
    return Finding(
        Cause.RANK_FAILED, f"{name}: rank {odd.rank} ended with code {odd.exit_code} {_where(odd)}{why}", rank=odd.rank
    )


def _mismatch(error: RankError) -> bool:
    return any(mark in error.message for mark in _MISMATCH)


def _where(rank: RankOutcome) -> str:
    return rank.phase


def _stack(rank: RankOutcome) -> str:
    """The innermost places in the code, without PyTorch's own."""
    frames = re.findall(r'File "([^"]+)", line (\d+) in (\S+)', rank.stack)
    own = [(file, line, function) for file, line, function in frames if not _is_library(file)]
    if not own:
        return ""
    return (
        " ("
        + ", called from ".join(f"{file.rsplit('/', 1)[-1]}:{line} in {name}" for file, line, name in own[:3])
        + ")"
    )


def _last_lines(error: RankError) -> str:
    """What was raised, and the last place of it that is not PyTorch's."""
    places = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', error.trace)
    own = [place for place in places if not _is_library(place[0])]
    where = f" ({own[-1][0].rsplit('/', 1)[-1]}:{own[-1][1]} in {own[-1][2]})" if own else ""
    return f"{_shortened(error.message)}{where}"


def _is_library(file: str) -> bool:
    return any(part in file for part in ("/torch/", "/multiprocessing/", "shardwise/verify/"))


def _shortened(message: str) -> str:
    calls = re.findall(
        r"Rank (\d+) is running collective: .*?OpType=(\w+)(?:, TensorShape=\[([\d, ]*)\], TensorDtypes=(\w+))?",
        message,
    )
    if len(calls) > 1:
        return "; ".join(
            f"rank {r} calls {op.lower()} of shape [{shape}], type {kind}" for r, op, shape, kind in calls[:2]
        )
    return one_line(message, 600)
