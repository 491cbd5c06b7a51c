"""Whether evaluation gives the same metrics on one process and on N ranks, from the same weights; and whether a run is what it
would be without."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from shardwise.verify.causes import Cause
from shardwise.verify.failure_report import trouble_of
from shardwise.verify.formatting import figure, listed
from shardwise.verify.groups import GroupResult
from shardwise.verify.measure import PROVES, apart, factor_of, floor_of
from shardwise.verify.report import Check, Finding, failed, passed, unproved

_passed, _failed = partial(passed, "evaluation"), partial(failed, "evaluation")
_unproved = partial(unproved, "evaluation")
UNCHANGED, METRICS = "changes nothing", "metrics"


def check_evaluation(
    without: GroupResult,
    alone: GroupResult,
    leader: GroupResult,
    ranks: GroupResult,
    repeated: Sequence[GroupResult],
    precision: str,
    samples: int,
) -> Iterator[Check]:
    """`without`, `alone`: one process, which does not evaluate and which does. `leader`, `ranks`: on the same weights.
    `repeated`: one process, with the last digits of the weights changed. `samples`: that could be validated on."""
    if not alone.fine:
        yield _failed(UNCHANGED, Finding(Cause.EVALUATION_FAILS, trouble_of(alone).what))
        return
    mine = alone.record().get("evaluation", {})
    if not mine:
        return
    if "error" in mine:
        yield _failed(METRICS, Finding(Cause.EVALUATION_FAILS, f"one process: {mine['error']}"))
        return
    yield _unchanged(without, alone, ranks)
    yield _kept(without, alone, precision) or _metrics(leader, ranks, repeated, precision, samples, alone)


def _unchanged(without: GroupResult, alone: GroupResult, ranks: GroupResult) -> Check:
    at = (alone.spec.evaluate_at or 0) + 1
    everyone = [alone, *([ranks] if ranks.fine else [])]
    for group in everyone:
        for rank, record in enumerate(group.records):
            found = record.get("evaluation", {})
            who = "" if group is alone else f" on rank {rank}"
            if changed := found.get("changed"):
                text = f"an evaluation changes {listed(changed)}{who}"
                return _failed(UNCHANGED, Finding(Cause.EVALUATION_CHANGES, text, rank=rank, step=at))
            if found.get("reseeded"):
                text = "an evaluation sets the seed of random numbers: what is drawn after it is the same each time"
                return _failed(UNCHANGED, Finding(Cause.EVALUATION_CHANGES, text, step=at))
    for row, before in zip(alone.steps[0], without.steps[0], strict=False):
        for key in ("loss", "grad_norm"):
            if row[key] != before[key]:
                text = (
                    f"step {row['step']}: {key} is {row[key]!r} in one process that evaluated before step {at}, and "
                    f"{before[key]!r} in one that did not{_attributes(alone)}"
                )
                cause = Cause.EVALUATION_CHANGES if row["step"] >= at else Cause.NOT_DETERMINISTIC
                return _failed(UNCHANGED, Finding(cause, text, step=row["step"]))
    steps = len(without.steps[0]) - at + 1
    return _passed(
        UNCHANGED,
        f"no weight, buffer, moment, frozen parameter or seed; the {steps} steps after it are, bit for bit, those of a run "
        "without",
    )


def _kept(without: GroupResult, alone: GroupResult, precision: str) -> Check | None:
    """After the last step, on the same weights: what evaluates for the first time must find what one does that has before."""
    first, later = without.record().get("last_metrics"), alone.record().get("last_metrics")
    if not first or not later or without.record()["weight_digests"] != alone.record()["weight_digests"]:
        return None
    for name, expected in first.items():
        if (gap := apart(later.get(name, math.nan), expected)) > 4 * floor_of(precision):
            text = (
                f"after {len(without.steps[0])} steps, {name} is {later.get(name)!r} in a process that has evaluated before, and "
                f"{expected!r} in one that has not, on the same weights: something is kept from one evaluation to the next"
            )
            return _failed(METRICS, Finding(Cause.EVALUATION_RANDOM, text + _attributes(alone), amount=gap))
    return None


def _attributes(group: GroupResult) -> str:
    changed = group.record()["evaluation"]["attributes"]
    return f". The evaluation changed {listed(changed)}" if changed else ""


def _metrics(
    leader: GroupResult,
    ranks: GroupResult,
    repeated: Sequence[GroupResult],
    precision: str,
    samples: int,
    group: GroupResult,
) -> Check:
    alone = group.record()["evaluation"]
    if alone["metrics"] != alone["again"] and (name := _first_other(alone["metrics"], alone["again"])):
        text = (
            f"{name} is {alone['metrics'].get(name)!r}, and {alone['again'].get(name)!r} when they are evaluated again"
        )
        return _failed(METRICS, Finding(Cause.EVALUATION_RANDOM, text + _attributes(group)))
    if not ranks.fine:
        finding = trouble_of(ranks)
        return _failed(METRICS, finding)
    everyone = [record["evaluation"] for record in ranks.records]
    if error := next((each["error"] for each in everyone if "error" in each), None):
        return _failed(METRICS, Finding(Cause.METRIC_DIFFERS, error))
    theirs = leader.record()["evaluation"]
    noise = [each.record()["evaluation"] for each in repeated if each.fine]
    ours, expected = everyone[0]["metrics"], theirs["metrics"]
    if set(ours) != set(expected):
        other = sorted(set(ours) ^ set(expected))
        return _failed(
            METRICS, Finding(Cause.METRIC_DIFFERS, f"{listed(other)}: not both of one process and of the ranks")
        )
    largest, loosest = 0.0, ("", 0.0)
    regrouped, size = theirs["regrouped"], theirs["regrouped_by"]
    for name in sorted(
        expected, key=lambda each: each not in theirs["own"]
    ):  # those that others follow from come first
        limit = _limit(name, expected, noise, precision)
        gap = apart(ours[name], expected[name])
        if gap > limit:
            return _failed(METRICS, _why(name, ours[name], expected[name], limit, everyone, theirs))
        if regrouped is not None and (off := apart(regrouped.get(name, math.nan), expected[name])) > limit:
            text = (
                f"in one process, on the same weights and samples, {name} is {expected[name]:.8g}, and "
                f"{regrouped.get(name, math.nan):.8g} in micro-batches of {size}; rounding explains {figure(limit)}"
            )
            return _failed(METRICS, Finding(Cause.METRIC_DIFFERS, text, amount=off))
        largest, loosest = max(largest, gap), max(loosest, (name, limit), key=lambda each: each[1])
    looked_at = min(leader.spec.valid_samples, samples)
    text = (
        f"{listed(sorted(expected))}: on one process and on {len(everyone)} ranks, on the same weights and {looked_at} of "
        f"{samples} samples; largest relative difference {figure(largest)}, rounding explains up to {figure(loosest[1])}"
    )
    if loosest[1] > PROVES:
        return _unproved(
            METRICS,
            text,
            f"Rounding may explain {loosest[1]:.0%} of {loosest[0]}: the last digits of the weights decide it. A metric of more "
            "samples, or of a model that has been trained, is steadier",
        )
    return _passed(METRICS, text)


def _limit(name: str, expected: dict[str, float], noise: Sequence[dict[str, Any]], precision: str) -> float:
    gaps = [apart(each["metrics"].get(name, math.nan), expected[name]) for each in noise if "metrics" in each]
    return max(4 * floor_of(precision), factor_of(precision) * max(gaps, default=0.0))


def _why(
    name: str,
    ours: float,
    expected: float,
    limit: float,
    everyone: Sequence[dict[str, Any]],
    leader: dict[str, Any],
) -> Finding:
    """`leader`: the evaluation of one process."""
    alone: dict[str, list[float]] = leader["own"]
    text = (
        f"{name} is {ours:.8g} on {len(everyone)} ranks and {expected:.8g} on one process, on the same weights and samples; "
        f"rounding explains {figure(limit)}"
    )
    redrawn = (leader["redrawn"] or {}).get(name, expected)
    if apart(redrawn, expected) > limit:
        text += (
            f". With another seed it is {redrawn:.8g} on one process: it is drawn, and every rank draws its own numbers"
        )
        return Finding(Cause.EVALUATION_RANDOM, text, amount=apart(ours, expected))
    parts = [each["own"].get(name) for each in everyone]
    if name not in alone or not all(parts):
        return Finding(Cause.METRIC_DIFFERS, text, amount=apart(ours, expected))
    counted = [rank for rank, part in enumerate(parts) if part and part[1]]
    given = [rank for rank, part in enumerate(parts) if part and part[0]]
    some = counted if len(counted) < len(parts) else given
    count = sum(part[1] for part in parts if part)
    if 0 < len(some) < len(parts):
        text += f". Only rank {', '.join(map(str, some))} gave anything to it"
        return Finding(Cause.METRIC_OF_SOME_RANKS, text, rank=some[0], amount=apart(ours, expected))
    if apart(count, alone[name][1]) > 1e-9:
        text += (
            f". The ranks together counted {count:g}, one process {alone[name][1]:g}: the count is not that of the samples, but "
            "of the micro-batches"
        )
    return Finding(Cause.METRIC_DIFFERS, text, amount=apart(ours, expected))


def _first_other(one: dict[str, float], other: dict[str, float]) -> str | None:
    return next((name for name in one if apart(one[name], other.get(name, math.inf))), None)
