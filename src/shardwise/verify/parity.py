"""Whether N ranks computed what one process did, quantity by quantity, in the order in which a training makes them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import Any

from shardwise.verify.by_hand import RANDOM, SPLIT_MATTERS
from shardwise.verify.causes import Cause
from shardwise.verify.compared import ONE_PROCESS, Compared
from shardwise.verify.formatting import figure, listed, module_of, within
from shardwise.verify.measure import (
    NOTHING,
    PROVES,
    Figures,
    Tolerance,
    apart,
    gradients_apart,
    is_narrow,
    left_open,
    weights_apart,
)
from shardwise.verify.probe import Probe
from shardwise.verify.report import Check, Finding, failed, noted, passed, unproved
from shardwise.verify.wrong_gradients import common_ratio, read_differently, why

_passed, _noted, _failed = partial(passed, "parity"), partial(noted, "parity"), partial(failed, "parity")
FIRST_GRADIENTS = "gradients at step 1"
TOO_LOUD = 0.05
"""Noise above which nothing can be proved: half of a gradient's digits would be chance."""


def check_single(
    probe: Probe, single: Figures, record: dict[str, Any], others: Sequence[dict[str, Any]], noise: Tolerance
) -> Iterator[Check]:
    """One process with the whole batch at once, against plain PyTorch. `others`: records of further runs by one process."""
    others_differ = False
    for what, kind in (("initial", "weights"), ("constants", "buffers")):
        before = record[what]
        unlike = [name for each in others for name, digest in each[what].items() if before.get(name, digest) != digest]
        if unlike and not others_differ:
            others_differ = True
            yield _failed(f"initial {kind}", _begins_otherwise(kind, list(dict.fromkeys(unlike)), record, others))
    differences = gradients_apart(single.gradients, probe.gradients)
    bad = {name: value for name, value in differences.items() if value > noise.gradients.get(name, noise.floor)}
    moved = probe.history.by_samples
    if moved:
        text = f"a pass over samples changes {listed(moved)} before the optimizer does, and other samples change it otherwise"
        yield _failed("weights in a pass", Finding(Cause.WEIGHTS_BY_SAMPLES, text, moved[0], step=1))
    history = _history(probe)
    if history is not None and not (moved and set(probe.history.changed) <= {f"parameter {name}" for name in moved}):
        yield history
    random = [] if others_differ else list(_random(probe, record, noise, bool(bad)))
    yield from random
    if probe.without_gradient:
        yield _without_gradient(probe)
    if record["tied"] != probe.tied:
        yield _failed("tied weights", _untied(probe.tied, record["tied"], "one process"))
        return
    different = [name for name, digest in record["initial"].items() if probe.initial.get(name, digest) != digest]
    if different:
        text = f"before the first step, one process has other weights than the task builds: {listed(different)}"
        yield _failed("one process", Finding(Cause.DIFFERENT_SEEDS, text, different[0], 0, 0))
        return
    ids = single.curve.ids[0]
    if ids != probe.ids:
        lacking, more = set(probe.ids) - set(ids), len(ids) - len(probe.ids)
        cause = Cause.DROPPED if lacking else Cause.REPEATED
        text = f"step 1 is the end of an epoch, {len(probe.ids)} samples; one process trained on {len(ids)}"
        text += f"; not among them: {listed(sorted(lacking))}" if lacking else f", {more} more than there are left"
        yield _failed("one process", Finding(cause, text, step=1))
        return
    causes = {check.finding.cause for check in [*random, *([history] if history else [])] if check.finding}
    if bad and not causes & {Cause.DATA_CHANGE, Cause.RANDOM_FORWARD, Cause.HIDDEN_STATE}:
        worst = max(bad, key=lambda name: bad[name])
        what = f"gradients of one process are not plain PyTorch's in {listed(list(bad))}; {worst}: {figure(bad[worst])}"
        ratio, cause = common_ratio(single.gradients, probe.gradients), Cause.ENGINE_STEP
        if ratio is not None:
            what, cause = f"{what}. All are {ratio:.4g} times what they should be", Cause.WRONG_SCALING
        yield _failed("one process", Finding(cause, what, next(iter(bad)), step=1, amount=bad[worst]))
    elif not bad:
        worst, value = _worst(differences)
        yield _answer(
            "one process",
            f"gradients are those of plain PyTorch: largest difference {figure(value)}{within(worst)}; rounding explains up "
            f"to {figure(noise.gradients.get(worst, noise.floor))}",
            _loosest(noise, differences, probe.precision),
        )


def _without_gradient(probe: Probe) -> Check:
    lacking, never = probe.without_gradient, probe.never_trained
    detail = f"{len(lacking)} trainable parameter(s) get no gradient at step 1: {listed(lacking)}"
    if not never:
        return _noted("parameters", f"{detail}. From other samples they do")
    some = "" if probe.tried == probe.samples else f" that were tried, of {probe.samples},"
    detail += f". None of {probe.tried} samples{some} gives one to {listed(never)}"
    if probe.tried == probe.samples and probe.detached and not probe.may_lack_gradients:
        return _failed("parameters", Finding(Cause.DETACHED_PARAMETER, detail, parameter=probe.detached[0], step=1))
    why = "Nothing tells whether they are ever trained. Freeze what is to stay as it is: requires_grad_(False)"
    return unproved("parity", "parameters", detail, why)


def _history(probe: Probe) -> Check | None:
    """A gradient that is another after other batches, on the same weights and samples and with the same seeds."""
    history = probe.history
    if history.matters <= RANDOM or probe.random_data > RANDOM:  # data that are others each time explain it
        return None
    moves = f"after other batches the same batch has a gradient that is {figure(history.matters)} off"
    if history.by_chance and not history.changed:
        text = (
            f"{moves}, with the same weights and seeds, and another process that computes the same batches gets other losses: "
            "it follows from the clock, a file, or a generator that no seed reaches"
        )
        return _failed("forward pass", Finding(Cause.RANDOM_FORWARD, text, amount=history.matters))
    if history.changed:
        text = f"a forward pass changes {listed(history.changed)}; {moves}, and with everything put back it has not"
    else:
        text = (
            f"{moves}, with the same weights and seeds, and in another process once more. No attribute of the task or the model "
            "tells: it is kept in a closure, the default of an argument, a hook, another class, or a file"
        )
    return _failed("state", Finding(Cause.HIDDEN_STATE, text, amount=history.matters))


def _begins_otherwise(kind: str, names: list[str], record: dict[str, Any], others: Sequence[dict[str, Any]]) -> Finding:
    text = f"one process that is started again begins with other {kind}: {listed(names)}"
    left = [record["weight_digests"], *(each["weight_digests"] for each in others)]
    if kind == "weights" and any(each["initial"] in left for each in others):
        text += (
            ". They are those that an earlier run ended with: the program keeps weights in a file of its own and loads them, "
            "without the optimizer's state, the cursor and the schedule, which session.save() and session.resume() carry"
        )
        return Finding(Cause.OPTIMIZER_NOT_RESTORED, text, names[0], step=0)
    return Finding(Cause.DIFFERENT_SEEDS, text, names[0], step=0)


def _answer(name: str, detail: str, tolerance: tuple[str, float]) -> Check:
    """Nothing differs by more than rounding explains. It is proved if that is little. `tolerance`: of what, and how much."""
    of, limit = tolerance
    if limit <= PROVES:
        return _passed(name, detail)
    return unproved(
        "parity",
        name,
        detail,
        f"Rounding may explain {limit:.0%} of {of}: a mistake of that size would not be seen. To be proved, it must be at most "
        f"{PROVES:.0%}. More samples per micro-batch, a wider precision or a smaller learning rate bring it down",
    )


def _loosest(tolerance: Tolerance, gaps: Mapping[str, float], precision: str) -> tuple[str, float]:
    """In a narrow type it is chance which parameter a rounding error hits: there all are taken together."""
    if is_narrow(precision):
        return "the gradient", tolerance.whole_gradient
    floor = tolerance.floor
    limits = {name: left_open(gap, tolerance.gradients.get(name, floor), floor) for name, gap in gaps.items()}
    worst, limit = _worst(limits)
    return worst or "the gradient", limit


def _random(probe: Probe, record: dict[str, Any], noise: Tolerance, differs: bool) -> Iterator[Check]:
    """What makes any comparison idle: data or a forward pass that are others every time, an order that matters."""
    loud = noise.largest_noise > TOO_LOUD
    if probe.random_data > RANDOM:
        text = (
            f"{probe.unlike} is another when it is read again by the same process, with the same seeds; the gradient moves by "
            f"{figure(probe.random_data)}"
        )
        yield _failed("data", Finding(Cause.DATA_CHANGE, text, step=1, amount=probe.random_data))
    elif (loud or differs) and (finding := read_differently(probe, [record])):
        yield _failed("data", finding)
    elif probe.random_forward <= RANDOM and loud:
        text = f"the same samples in another order give gradients that are {figure(noise.largest_noise)} apart in one process"
        cause = Cause.ORDER_MATTERS
        if probe.drawn:
            text += "; with another seed they are other ones: something is drawn when they are put together"
        elif probe.split_matters_without_batch_norm > SPLIT_MATTERS:
            cause = Cause.LOSS_IS_NO_SUM
            text += f"; split into the ranks' micro-batches, {figure(probe.split_matters_without_batch_norm)}"
        yield _failed("order in a batch", Finding(cause, text, amount=noise.largest_noise))
    if probe.unlike and probe.random_data <= RANDOM:
        yield _noted("data", f"not the same when read again, which the gradient does not show: {probe.unlike}")
    if probe.random_forward > RANDOM >= probe.history.matters:
        text = (
            f"the same batch gives gradients that are {figure(probe.random_forward)} apart when nothing but the seed of the "
            "generators is changed"
        )
        yield _failed("forward pass", Finding(Cause.RANDOM_FORWARD, text, amount=probe.random_forward))


def check_parity(both: Compared) -> list[Check]:
    """Every quantity, in the order in which a training makes them."""
    quantities = (
        _tied,
        _initial,
        _made_later,
        _samples,
        _counts,
        _settings,
        _rates,
        _gradients,
        _norms,
        _losses,
        _weights,
    )
    return [check for look_at in quantities for check in look_at(both)]


# ---------------------------------------------------------------- before the first step


def _tied(both: Compared) -> Iterator[Check]:
    for rank, record in enumerate(both.ranks.records):
        names = set(record["initial"])
        expected = [group for group in both.probe.tied if all(name in names for name in group[:1])]
        if [group for group in expected if group not in record["tied"]]:
            yield _failed("tied weights", _untied(expected, record["tied"], f"rank {rank}", rank))
            return
    if both.probe.tied:
        yield _passed("tied weights", "; ".join(" = ".join(group) for group in both.probe.tied) + " on every rank")


def _untied(expected: list[list[str]], found: list[list[str]], where: str, rank: int | None = None) -> Finding:
    lost = next((group for group in expected if group not in found), expected[0] if expected else found[0])
    return Finding(
        Cause.TIED_WEIGHT_SPLIT,
        f"{' and '.join(lost)} are one parameter in the model as it is built, and no longer on {where}",
        parameter=lost[0],
        rank=rank,
    )


def _initial(both: Compared) -> Iterator[Check]:
    for what, cause in (("initial", Cause.DIFFERENT_SEEDS), ("constants", Cause.STALE_BUFFERS)):
        reference = both.reference_record[what]
        for rank, record in enumerate(both.ranks.records):
            different = [name for name, digest in record[what].items() if reference.get(name, digest) != digest]
            if different:
                kind = "weights" if what == "initial" else "buffers"
                text = f"before the first step, rank {rank} has other {kind} than {both.reference_name}: {listed(different)}"
                yield _failed(f"initial {kind}", Finding(cause, text, different[0], rank, 0))
                break
        else:
            if what == "initial":
                yield _passed("initial weights", f"the same on {both.reference_name} and on every rank, bit for bit")


def _made_later(both: Compared) -> Iterator[Check]:
    """Parameters that were not there when the model was laid over the ranks."""
    for rank, record in enumerate(both.ranks.records):
        if later := [name for name in record["weight_digests"] if name not in record["initial"]]:
            text = f"made by a forward pass, so that nothing sends it to the other ranks, updates it or saves it: {listed(later)}"
            yield _failed("parameters", Finding(Cause.UNSYNCHRONISED_PARAMETER, text, later[0], rank))
            return


def _samples(both: Compared) -> Iterator[Check]:
    ours, theirs = both.run.curve.ids, both.reference.curve.ids
    for step, (mine, expected) in enumerate(zip(ours, theirs, strict=False), start=1):
        if mine == expected:
            continue
        twice = sorted({index for index in mine if mine.count(index) > 1})
        lacking = sorted(set(expected) - set(mine))
        text = (
            f"step {step}: the ranks together trained on {len(mine)} samples, {both.reference_name} on {len(expected)}"
            + (f"; twice: {listed(twice)}" if twice else "")
            + (f"; not at all: {listed(lacking)}" if lacking else "")
        )
        yield _failed("samples", Finding(Cause.SAMPLER, text, step=step))
        return
    sizes = ", ".join(str(len(ids)) for ids in ours)
    yield _passed("samples", f"the same in every step ({sizes} samples), whoever computed them")


def _counts(both: Compared) -> Iterator[Check]:
    """What the loss is divided by is a whole number: no rounding is in it."""
    ours, theirs = both.run.curve, both.reference.curve
    for step, (mine, expected) in enumerate(zip(ours.counts, theirs.counts, strict=False), start=1):
        if mine != expected and ours.ids[step - 1] == theirs.ids[step - 1]:
            text = (
                f"step {step}: the ranks together count {mine} on the same {len(theirs.ids[step - 1])} samples, "
                f"{both.reference_name} {expected}: what is counted depends on which samples are put together"
            )
            yield _failed("counts", Finding(Cause.LOSS_IS_NO_SUM, text, step=step))
            return


def _settings(both: Compared) -> Iterator[Check]:
    """A program may make its config itself. The runs of the proof have their own number of steps, so rates do not tell all."""
    expected = both.reference_record["asked"]
    for rank, record in enumerate(both.ranks.records if both.reference_name == ONE_PROCESS else ()):
        for key, value in record["asked"].items():
            if value != expected[key]:
                text = (
                    f"the config has training.{key}: {value} on rank {rank} of {len(both.ranks.records)}, and {expected[key]} on "
                    "one process: another schedule"
                )
                yield _failed("settings", Finding(Cause.SCHEDULE, text, rank=rank))
                return


def _rates(both: Compared) -> Iterator[Check]:
    for step, (mine, expected) in enumerate(
        zip(both.run.curve.rates, both.reference.curve.rates, strict=False), start=1
    ):
        if apart(mine, expected) > 1e-9:
            text = f"step {step}: learning rate {mine:g}, where {both.reference_name} has {expected:g}"
            yield _failed("learning rate", Finding(Cause.SCHEDULE, text, step=step, amount=apart(mine, expected)))
            return
    rates = both.run.curve.rates
    yield _passed("learning rate", f"the same in every step, {rates[0]:.3g} to {rates[-1]:.3g}")


# ---------------------------------------------------------------- gradients


def _gradients(both: Compared) -> Iterator[Check]:
    differences = gradients_apart(both.run.gradients, both.reference.gradients)
    bad = {name: value for name, value in differences.items() if value > both.gradient_limit(name)}
    unequal = _unequal_between_ranks([record["gradient_digests"] for record in both.ranks.records])
    missing = [rank for rank, record in enumerate(both.ranks.records) if not record["gradient_digests"]]
    name = FIRST_GRADIENTS
    if missing and len(missing) < len(both.ranks.records):
        text = f"rank {missing[0]} skipped step 1, the others did not"
        yield _failed(name, Finding(Cause.SOME_RANKS_UPDATE, text, rank=missing[0], step=1))
    elif unequal:
        first = next(iter(unequal))
        every = len(unequal) == len(both.run.gradients)
        text = (
            f"step 1: after the backward pass, rank {unequal[first]} holds another gradient than rank 0 for "
            + (
                "every parameter"
                if every
                else f"{len(unequal)} of {len(both.run.gradients)} parameters: {listed(list(unequal))}"
            )
            + f"; {module_of(first)}, and {figure(differences.get(first, math.nan))} off {both.reference_name}"
        )
        cause = Cause.ALL_UNSYNCHRONISED if every else Cause.UNSYNCHRONISED_PARAMETER
        if ratios := every and _factors(both):
            cause, text = Cause.WRONG_SCALING, f"{text}. {ratios}"
        yield _failed(name, Finding(cause, text, first, unequal[first], 1, differences.get(first)))
    elif bad:
        yield _failed(name, why(both, differences, bad))
    else:
        worst, value = _worst(differences)
        yield _answer(
            name,
            f"{len(differences)} parameters: largest relative difference {figure(value)}{within(worst)}; rounding explains "
            f"up to {figure(both.gradient_limit(worst))}",
            _loosest(both.tolerance, differences, both.probe.precision),
        )


def _factors(both: Compared) -> str:
    """In words, if every rank holds the right gradient, times a factor of its own."""
    held = [record["gradients"] for record in both.ranks.records]
    ratios = [common_ratio(each, both.reference.gradients) if each else None for each in held]
    if None in ratios:
        return ""
    factors = ", ".join(f"{ratio:.4g} on rank {rank}" for rank, ratio in enumerate(ratios))
    return (
        f"They are the right ones times a factor: {factors}. Each rank scales what was reduced by something of its own"
    )


def _unequal_between_ranks(digests: Sequence[dict[str, str]]) -> dict[str, int]:
    """Parameters whose gradient is not the same on every rank that has it, and the first such rank."""
    found: dict[str, int] = {}
    for rank, mine in enumerate(digests):
        for name, digest in mine.items():
            if digests[0].get(name, digest) != digest:
                found.setdefault(name, rank)
    return {name: found[name] for name in digests[0] if name in found}


# ---------------------------------------------------------------- norms, losses, weights


def _norms(both: Compared) -> Iterator[Check]:
    clipped = sum(norm > both.probe.plan.clip for norm in both.reference.curve.norms)
    per_rank = [[row["grad_norm"] for row in steps] for steps in both.ranks.steps]
    for step, norms in enumerate(zip(*per_rank, strict=False), start=1):
        if len(set(norms)) > 1:
            rank = next(rank for rank, norm in enumerate(norms) if norm != norms[0])
            text = f"step {step}: rank {rank} clips by norm {norms[rank]:.6g}, rank 0 by {norms[0]:.6g}"
            yield _failed("gradient norm", Finding(Cause.CLIP_NORM, text, rank=rank, step=step))
            return
    yield from _curve(
        both,
        "gradient norm",
        Cause.CLIP_NORM,
        both.run.curve.norms,
        both.reference.curve.norms,
        both.tolerance.norms,
        f", clipped at {both.probe.plan.clip:.3g} in {clipped} of them",
    )


def _losses(both: Compared) -> Iterator[Check]:
    yield from _curve(
        both, "loss", Cause.REPORTED_LOSS, both.run.curve.losses, both.reference.curve.losses, both.tolerance.losses, ""
    )


def _curve(
    both: Compared, name: str, at_first: Cause, ours: list[float], theirs: list[float], limits: list[float], more: str
) -> Iterator[Check]:
    """At the first step the two have computed on the same weights; what differs only later has drifted."""
    largest, left = 0.0, list[float]()
    for step, (mine, expected, limit) in enumerate(zip(ours, theirs, limits, strict=False), start=1):
        gap = apart(mine, expected)
        left.append(left_open(gap, limit, both.tolerance.floor))
        if gap > limit:
            text = (
                f"step {step}: {name} {mine:.8g}, where {both.reference_name} has {expected:.8g}: {figure(gap)} apart, "
                f"rounding explains {figure(limit)}"
            )
            yield _failed(name, Finding(at_first if step == 1 else Cause.DRIFT, text, step=step, amount=gap))
            return
        largest = max(largest, gap)
    told = list(takewhile(lambda limit: limit <= PROVES, left))
    fewer = f" (proved in the first {len(told)}: from then on rounding explains more than {PROVES:.0%})"
    yield _answer(
        name,
        f"{len(ours)} steps{more}: largest relative difference {figure(largest)}; rounding explains up to "
        f"{figure(max(told or left))}" + (fewer if 0 < len(told) < len(left) else ""),
        (f"the {name}", max(told) if told else left[0]),
    )


def _weights(both: Compared) -> Iterator[Check]:
    """On their own, two runs of a lively model drift apart by rounding alone. So each weight is compared as long as rounding
    explains little of its way."""
    steps = sorted(set(both.run.weights) & set(both.reference.weights))
    name = f"weights after {steps[-1]} steps"
    last: dict[str, int] = {}
    found: dict[str, float] = {}
    limits: dict[str, float] = {}
    for step in steps:
        differences = weights_apart(both.run.weights[step], both.reference.weights[step], both.start)
        for key, value in differences.items():
            limit = both.weight_limit(key, step)
            if value > limit and limit <= PROVES:
                bad = [each for each, gap in differences.items() if gap > both.weight_limit(each, step)]
                text = (
                    f"after {step} steps {len(bad)} of {len(differences)} weights differ; first {module_of(key)}, by "
                    f"{figure(value)} of the way it was trained; rounding explains {figure(limit)}"
                )
                yield _failed(name, Finding(Cause.DRIFT, text, key, 0, step, value))
                return
            if (limit := left_open(value, limit, both.tolerance.floor)) <= PROVES:
                last[key], found[key], limits[key] = step, value, limit
    whole = math.hypot(*(float(each.float().norm()) for each in both.reference.gradients.values()))
    every = both.reference.last_weights
    nothing = [key for key in every if key not in last and _norm(both.reference, key) <= NOTHING * whole]
    open_ones = [key for key in every if key not in last and key not in nothing]
    worst, value = _worst(found)
    limit = limits.get(worst, both.tolerance.floor)
    detail = (
        f"{len(last)} parameters: largest difference {figure(value)} of the way trained{within(worst)}; rounding explains up to "
        f"{figure(limit)}"
    )
    early = [key for key in last if last[key] < steps[-1]]
    if early:
        detail += (
            f"; {len(early)} of them are compared after fewer steps ({min(last[key] for key in early)} at least), because later "
            f"rounding explains more than {PROVES:.0%}"
        )
    if nothing:
        detail += f"; left out: {listed(nothing)}, whose gradient is nothing but rounding, so that its way is chance"
    if open_ones:
        detail += f"; not compared: {listed(open_ones)}"
    share = min((both.weight_limit(key, steps[0]) for key in open_ones), default=0.0)
    yield _answer(name, detail, (f"the way of {listed(open_ones)}", share))


def _norm(figures: Figures, name: str) -> float:
    return float(figures.gradients[name].float().norm()) if name in figures.gradients else 0.0


def _worst(differences: dict[str, float]) -> tuple[str, float]:
    name = max(differences, key=lambda each: differences[each], default="")
    return name, differences.get(name, 0.0)
