"""Killed and resumed: bit for bit on the same ranks, the same curve on others."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from shardwise.verify.causes import Cause
from shardwise.verify.compared import figures_of
from shardwise.verify.failure_report import trouble_of
from shardwise.verify.formatting import listed
from shardwise.verify.groups import GroupResult
from shardwise.verify.measure import PROVES, Tolerance, apart, weights_apart
from shardwise.verify.report import Check, Finding, failed, noted, passed, unproved

_passed, _noted, _failed = partial(passed, "resume"), partial(noted, "resume"), partial(failed, "resume")
SAME = "killed and resumed"


def check_resume(
    undisturbed: GroupResult,
    killed: GroupResult,
    resumed: GroupResult | None,
    tolerance: Tolerance,
    save_at: int,
    kill_at: int,
) -> list[Check]:
    """`undisturbed` saved at the same step and went on; `killed` was ended by SIGKILL in the middle of a later step."""
    if not killed.killed:
        return [_failed(SAME, trouble_of(killed))]
    finding = _not_the_same_before(undisturbed, killed)
    if finding:
        return [_failed(SAME, finding)]
    if resumed is None or not left_a_checkpoint(killed):
        text = f"ranks saved at step {save_at} and were killed in step {kill_at}; no whole checkpoint is there"
        return [_failed(SAME, Finding(Cause.NO_CHECKPOINT, text, step=kill_at))]
    if not resumed.fine:
        return [_failed(SAME, trouble_of(resumed))]
    finding = next(_differences(undisturbed, resumed, save_at), None)
    if finding and finding.cause is Cause.RESUME and _within_rounding(undisturbed, resumed, tolerance):
        finding = replace(finding, cause=Cause.SUMS_IN_ANOTHER_ORDER)
    finding = finding or _evaluates_otherwise(undisturbed, resumed)
    if finding:
        return [_failed(SAME, finding)]
    world, steps = undisturbed.spec.world, undisturbed.record()["snapshots"]["end"]["steps_done"]
    text = (
        f"{world} rank(s) saved at step {_resumed_at(resumed)}, killed by SIGKILL in step {kill_at}, new processes to step "
        f"{steps}: losses, learning rates, weights and optimizer state are bit for bit those of the undisturbed run"
    )
    return [_passed(SAME, text)]


def _evaluates_otherwise(undisturbed: GroupResult, resumed: GroupResult) -> Finding | None:
    """With the same weights, after the last step."""
    before, after = (group.record().get("last_metrics") or {} for group in (undisturbed, resumed))
    for name, expected in before.items():
        if gap := apart(after.get(name, math.nan), expected):
            text = (
                f"after the last step {name} is {after.get(name)!r}, and was {expected!r} undisturbed, on the same weights: what "
                "is evaluated follows from something that no checkpoint carries, such as an average in an attribute"
            )
            return Finding(Cause.RESUME, text, amount=gap)
    return None


def check_program(program: Path, undisturbed: GroupResult, resumed: GroupResult | None) -> Iterator[Check]:
    """A loop of one's own: whether it saves and resumes as its user would have it. Where it does not, verify did it instead."""
    name, steps = "its own saving", len(undisturbed.steps[0])
    saves = sorted(undisturbed.record()["own_saves"])
    if saves:
        yield _passed(name, f"the program saves by itself, after step {', '.join(map(str, saves))}")
    elif not _calls_save(program):
        text = f"{program} calls no save(): verify has saved for it, nobody else will"
        yield _failed(name, Finding(Cause.NEVER_SAVES, text))
    else:
        text = f"the program saved nothing in the middle of {steps} steps; verify has saved for it"
        why = (
            "Choose --steps larger than the interval at which it saves. If it saves at its end alone, a kill loses all"
        )
        yield unproved("resume", name, text, why)
    if resumed is not None and resumed.fine:
        if resumed.record()["resumed_itself"]:
            yield _passed("its own resume", "started again, the program goes on from its checkpoint by itself")
        else:
            text = f"started again beside a whole checkpoint, {program} began anew; verify has resumed for it"
            yield _failed("its own resume", Finding(Cause.NEVER_RESUMES, text))
        yield from _not_brought_back(undisturbed, resumed)


def _not_brought_back(undisturbed: GroupResult, resumed: GroupResult) -> Iterator[Check]:
    """Numbers in the program's observers that had moved when it saved, and begin anew after a resume."""
    at = f"step {_resumed_at(resumed)}"
    began, saved = undisturbed.record()["watching"], undisturbed.record()["snapshots"].get(at, {}).get("watching", {})
    after = resumed.record()["snapshots"]["begins"]["watching"]
    lost = [name for name, value in saved.items() if value != began.get(name) and value != after.get(name)]
    if lost:
        text = f"{listed(lost)} had moved when the program saved, and a resume begins with the first value"
        why = (
            "Nothing followed from it in these steps. If something does later, a resumed run is another one: keep such a number "
            "in a buffer of the model, or make it follow from run.steps_done. If nothing does, nothing is wrong"
        )
        yield unproved("resume", "its own state", text, why)


def _calls_save(program: Path) -> bool:
    calls = (node.func for node in ast.walk(ast.parse(program.read_text())) if isinstance(node, ast.Call))
    return any(isinstance(called, ast.Attribute) and called.attr == "save" for called in calls)


def check_other_ranks(
    undisturbed: GroupResult,
    other: GroupResult,
    tolerance: Tolerance,
    start: dict[str, Any],
    *,
    split_matters: bool,
    from_the_same: float | None,
    moving: Sequence[str] = (),
) -> Check:
    """The same global batches on another number of ranks. `from_the_same`: how far rounding brings the loss of one step, which
    begins with the same weights, from itself, where that was measured. The first step after a resume is such a step. `moving`:
    buffers that move with every forward pass, and that the gradient depends on."""
    name = f"resumed on {other.spec.world} rank(s)"
    if not other.fine:
        return _failed(name, trouble_of(other))
    if split_matters:
        return _noted(name, "it runs; batch norm sees other micro-batches there, so its curve is another")
    save_at = _resumed_at(other)
    ours, theirs = figures_of(other), figures_of(undisturbed)
    rows = {row["step"]: row for row in other.steps[0]}
    limits = dict(enumerate(tolerance.losses, start=1))
    first = save_at + 1
    if from_the_same is not None:
        limits[first] = max(from_the_same, min(limits[first], PROVES))
    largest, proved, beyond = 0.0, 0.0, 0
    for step in range(first, len(theirs.curve.losses) + 1):
        if step not in rows:
            text = f"step {step} was not trained after the resume at step {save_at}"
            return _failed(name, Finding(Cause.OTHER_RANKS, text, step=step))
        limit, gap = limits[step], apart(rows[step]["loss"], theirs.curve.losses[step - 1])
        if gap > limit and moving:
            text = f"it goes on; {listed(moving)} moves with every forward pass, and a step has another number of them there"
            why = "Move it once per step, for example in an observer after the update, and the curve no longer depends on ranks"
            return unproved("resume", name, text, why)
        if gap > limit:
            text = (
                f"step {step}: loss {rows[step]['loss']:.8g}, where {undisturbed.spec.world} ranks have "
                f"{theirs.curve.losses[step - 1]:.8g}; rounding explains a relative difference of {limit:.1e}"
            )
            return _failed(name, Finding(Cause.OTHER_RANKS, text, step=step, amount=gap))
        if limit <= PROVES:
            largest, proved = max(largest, gap), max(proved, limit)
        else:
            beyond += 1
    last = max(tolerance.weights)
    for key, gap in weights_apart(ours.last_weights, theirs.last_weights, start).items():
        if PROVES >= tolerance.weights[last].get(key, tolerance.floor) < gap:
            text = f"after the last step {key} differs by {gap:.1e} of the way it was trained"
            return _failed(name, Finding(Cause.OTHER_RANKS, text, parameter=key, amount=gap))
    if limits[first] > PROVES:
        text = f"it goes on; from the first step on, rounding explains {limits[first]:.1e} of the loss"
        why = f"That is more than {PROVES:.0%} of the loss: a mistake of that size would not be seen"
        return unproved("resume", name, text, why)
    text = f"the same curve: largest relative difference of a loss {largest:.1e}; rounding explains up to {proved:.1e}"
    if beyond:
        text += f". In {beyond} of the steps it explains more, so that they prove nothing"
    return _passed(name, text)


def _resumed_at(group: GroupResult) -> int:
    """A program may have saved later than verify did."""
    step: int = group.record()["snapshots"]["resumed"]["steps_done"]
    return step


def _not_the_same_before(undisturbed: GroupResult, killed: GroupResult) -> Finding | None:
    """Up to the kill both did the same. If they differ, it is not the resume's fault."""
    for rank, (mine, other) in enumerate(zip(killed.steps, undisturbed.steps, strict=True)):
        for row, expected in zip(mine, other, strict=False):
            for key in ("loss", "grad_norm", "lr", "ids"):
                if row[key] != expected[key]:
                    text = f"step {row['step']}: {key} is {row[key]!r} on rank {rank}, and was {expected[key]!r} before"
                    return Finding(Cause.NOT_DETERMINISTIC, text[:300], rank=rank, step=row["step"])
    return None


def _within_rounding(undisturbed: GroupResult, resumed: GroupResult, tolerance: Tolerance) -> bool:
    steps = {row["step"]: row for row in undisturbed.steps[0]}
    pairs = [(row, steps[row["step"]]) for row in resumed.steps[0] if row["step"] in steps]
    return bool(pairs) and all(
        apart(row["loss"], before["loss"]) <= tolerance.loss
        and apart(row["grad_norm"], before["grad_norm"]) <= tolerance.norm
        for row, before in pairs
    )


def left_a_checkpoint(killed: GroupResult) -> bool:
    return any((killed.spec.run_folder / "checkpoints").glob("step-*"))


def _differences(undisturbed: GroupResult, resumed: GroupResult, save_at: int) -> Iterator[Finding]:
    """First what the checkpoint carries, as it is right after loading; then what follows from it."""
    snapshots = [[record["snapshots"] for record in group.records] for group in (resumed, undisturbed)]
    for rank, (mine, expected) in enumerate(zip(*snapshots, strict=True)):
        if "resumed" not in mine:
            yield Finding(Cause.NO_CHECKPOINT, "the resumed run found no checkpoint", rank=rank)
            return
        loaded = mine["resumed"]
        saved = expected.get(f"step {loaded['steps_done']}", expected["saved"])  # a program may have saved later
        where = f"right after the resume at step {saved['steps_done']}, on rank {rank},"
        for key, cause in _CARRIED.items():
            if loaded[key] != saved[key]:
                yield Finding(cause, f"{where} {_what(key, loaded[key], saved[key])}", rank=rank, step=save_at)
        for key in ("weights", "optimizer"):
            if mine["begins"][key] != loaded[key]:
                text = f"between the resume and the first step, on rank {rank}, {_what(key, mine['begins'][key], loaded[key])}"
                yield Finding(_CARRIED[key], text, rank=rank, step=save_at)
    for rank, (mine, expected) in enumerate(zip(*snapshots, strict=True)):
        steps = {row["step"]: row for row in undisturbed.steps[rank]}
        for row in resumed.steps[rank]:
            before = steps.get(row["step"])
            for key, cause in _FOLLOWS.items():
                if before is None or row[key] != before[key]:
                    was = before[key] if before else "no such step"
                    text = f"step {row['step']}, rank {rank}: {key} is {row[key]!r}, and was {was!r} undisturbed"
                    yield Finding(cause, text[:300], rank=rank, step=row["step"])
        for key in ("weights", "optimizer"):
            if mine["end"][key] != expected["end"][key]:
                text = f"after the last step, on rank {rank}, {_what(key, mine['end'][key], expected['end'][key])}"
                yield Finding(Cause.RESUME, text, rank=rank)


_CARRIED = {
    "weights": Cause.WEIGHTS_NOT_RESTORED,
    "cursor": Cause.CURSOR_NOT_RESTORED,
    "steps_done": Cause.RESUME,
    "next_lr": Cause.SCHEDULE_NOT_RESTORED,
    "optimizer": Cause.OPTIMIZER_NOT_RESTORED,
    "buffers": Cause.STALE_BUFFERS,
    "scaler": Cause.RESUME,
}
_FOLLOWS = {
    "lr": Cause.SCHEDULE_NOT_RESTORED,
    "ids": Cause.CURSOR_NOT_RESTORED,
    "loss": Cause.RESUME,
    "grad_norm": Cause.RESUME,
}


def _what(key: str, found: Any, expected: Any) -> str:
    if isinstance(found, dict) and key in ("weights", "optimizer", "buffers"):
        names = [name for name in expected if found.get(name) != expected[name]]
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        return f"the {key} {'state ' if key == 'optimizer' else ''}differs: {shown}"
    return f"{key.replace('_', ' ')} is {found}, and was {expected} when it was saved"
