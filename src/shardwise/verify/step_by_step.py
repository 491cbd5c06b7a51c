"""Every step from the same weights: one process goes ahead, the ranks follow, and take each step from the weights and moments
that it had. So nothing piles up, and a bug that begins late, or in one rare batch, stands beside rounding alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median

from torch import Tensor

from shardwise.verify.causes import Cause
from shardwise.verify.compared import figures_of
from shardwise.verify.formatting import figure, listed, module_of, within
from shardwise.verify.groups import GroupResult
from shardwise.verify.measure import (
    NOTHING,
    PROVES,
    Figures,
    apart,
    factor_of,
    floor_of,
    gradients_apart,
    is_narrow,
    last_digits,
    left_open,
    norm_of,
    together,
    weights_apart,
)
from shardwise.verify.report import Check, Finding, failed, passed, unproved

_failed = partial(failed, "parity")
GRADIENTS, UPDATES = "gradients of each step", "updates of each step"
Weights = Mapping[str, Tensor]


@dataclass
class Step:
    """One step of one run."""

    number: int
    gradients: Weights
    before: Weights
    """The weights that it began with: those of the process that went ahead."""
    after: Weights
    loss: float
    norm: float
    ids: list[int] = field(repr=False)
    count: int


def steps_of(group: GroupResult, leader: Figures, start: Weights) -> list[Step]:
    found = figures_of(group)
    curve = found.curve
    return [
        Step(
            number,
            found.gradients_by_step[number],
            start if number == 1 else leader.weights[number - 1],
            found.weights[number],
            *row,
        )
        for number, row in enumerate(zip(curve.losses, curve.norms, curve.ids, curve.counts, strict=True), start=1)
        if number in found.gradients_by_step
    ]


@dataclass
class Noise:
    """How far rounding brings one step of one process from itself, by parameter; and what may be made of it."""

    precision: str
    gradients: list[dict[str, float]]
    """By step."""
    updates: list[dict[str, float]]
    whole_gradient: list[float]
    whole_update: list[float]
    losses: list[float]

    @classmethod
    def measured(cls, expected: Sequence[Step], repeated: Sequence[Sequence[Step]], precision: str) -> Noise:
        noise = cls(precision, [], [], [], [], [])
        for step, others in zip(expected, zip(*repeated, strict=False), strict=False):
            noise.gradients.append(_largest([gradients_apart(other.gradients, step.gradients) for other in others]))
            noise.updates.append(_largest([weights_apart(other.after, step.after, step.before) for other in others]))
            noise.whole_gradient.append(max(together(other.gradients, step.gradients) for other in others))
            noise.whole_update.append(max(_update_apart(other, step) for other in others))
            noise.losses.append(max(apart(other.loss, step.loss) for other in others))
        return noise

    def gradient_limit(self, number: int, name: str) -> float:
        return self._limit(self.gradients, number, name)

    def update_limit(self, number: int, name: str, step: Step) -> float:
        limit = self._limit(self.updates, number, name)
        return limit if is_narrow(self.precision) else max(limit, last_digits(step.after[name], step.before[name]))

    def loss_limit(self, number: int) -> float:
        return max(floor_of(self.precision), factor_of(self.precision) * max(self.losses[number], median(self.losses)))

    def whole_limit(self, of: list[float]) -> float:
        return max(floor_of(self.precision), factor_of(self.precision) * max(of, default=0.0))

    def _limit(self, of: list[dict[str, float]], number: int, name: str) -> float:
        """By chance two repetitions may hardly differ in one step: there, what is usual in the others counts."""
        if is_narrow(self.precision):  # it is chance which parameter a rounding error hits
            largest = max(of[number].values(), default=0.0)
        else:
            largest = max(of[number].get(name, 0.0), median(each.get(name, 0.0) for each in of))
        return max(floor_of(self.precision), factor_of(self.precision) * largest)


def _largest(found: Sequence[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for each in found for name in each)
    return {name: max(each.get(name, 0.0) for each in found) for name in names}


def _update_apart(one: Step, other: Step) -> float:
    return together(_update(one), _update(other))


def _update(step: Step) -> dict[str, Tensor]:
    return {name: each.float() - step.before[name].float() for name, each in step.after.items()}


@dataclass
class Differs:
    """The first step at which gradients do."""

    step: int
    parameter: str
    amount: float
    limit: float
    bad: list[str]
    of: int
    ids: list[int]

    @property
    def told(self) -> str:
        return (
            f"step {self.step}, from the same weights and moments: {len(self.bad)} of {self.of} gradients differ; first "
            f"{module_of(self.parameter)}, by {figure(self.amount)} where rounding explains {figure(self.limit)}"
        )


def first_difference(ours: Sequence[Step], expected: Sequence[Step], noise: Noise) -> Differs | None:
    for number, (mine, theirs) in enumerate(zip(ours, expected, strict=False)):
        gaps = gradients_apart(mine.gradients, theirs.gradients)
        bad = [name for name, gap in gaps.items() if not gap <= noise.gradient_limit(number, name)]
        if bad:
            limit = noise.gradient_limit(number, bad[0])
            return Differs(mine.number, bad[0], gaps[bad[0]], limit, bad, len(gaps), theirs.ids)
    return None


def check_steps(
    ours: Sequence[Step],
    expected: Sequence[Step],
    noise: Noise,
    differs: Differs | None,
    cause: tuple[Cause, str] | None,
) -> Iterator[Check]:
    """`differs`: what `first_difference` found; `cause`: and why, as far as experiments tell."""
    samples = len({index for step in expected for index in step.ids})
    for mine, theirs in zip(ours, expected, strict=False):
        if mine.count != theirs.count and mine.ids == theirs.ids:
            text = (
                f"step {mine.number}: the ranks together count {mine.count} on the same {len(theirs.ids)} samples, one process "
                f"{theirs.count}: what is counted depends on which samples are put together"
            )
            yield _failed("counts of each step", Finding(Cause.LOSS_IS_NO_SUM, text, step=mine.number))
            break
    if differs is not None:
        kind, how = cause or (Cause.GRADIENTS if differs.step == 1 else Cause.BEGINS_LATER, "")
        yield _failed(
            GRADIENTS, Finding(kind, differs.told + how, differs.parameter, step=differs.step, amount=differs.amount)
        )
    elif any(step.ids != theirs.ids for step, theirs in zip(ours, expected, strict=False)):
        return  # other samples, as "samples" says
    else:
        yield _gradients(ours, expected, noise, samples)
    for number, (mine, theirs) in enumerate(zip(ours, expected, strict=False)):
        if differs is None and apart(mine.loss, theirs.loss) > noise.loss_limit(number):
            text = (
                f"step {mine.number}, from the same weights: loss {mine.loss:.8g}, where one process has {theirs.loss:.8g}; "
                f"rounding explains {figure(noise.loss_limit(number))}"
            )
            yield _failed("losses of each step", Finding(Cause.REPORTED_LOSS, text, step=mine.number))
            break
    yield from _updates(ours, expected, noise, differs)


def _gradients(ours: Sequence[Step], expected: Sequence[Step], noise: Noise, samples: int) -> Check:
    largest, where, limits = 0.0, "", {}
    for number, (mine, theirs) in enumerate(zip(ours, expected, strict=False)):
        for name, gap in gradients_apart(mine.gradients, theirs.gradients).items():
            limits[number, name] = left_open(gap, noise.gradient_limit(number, name), floor_of(noise.precision))
            if gap >= largest:
                largest, where = gap, f"{name} at step {mine.number}"
    text = (
        f"{len(expected)} steps, {samples} samples, each step from the same weights and moments: largest relative difference "
        f"{figure(largest)}{within(where)}; "
    )
    if is_narrow(noise.precision):
        limit = noise.whole_limit(noise.whole_gradient)
        return _answer(
            GRADIENTS,
            f"{text}rounding explains up to {figure(limit)} of the gradient as a whole",
            limit,
            "the gradient",
        )
    loosest = max(limits, key=lambda each: limits[each])
    return _answer(
        GRADIENTS,
        f"{text}rounding explains up to {figure(limits[loosest])}",
        limits[loosest],
        f"the gradient of {loosest[1]}",
    )


def _updates(ours: Sequence[Step], expected: Sequence[Step], noise: Noise, differs: Differs | None) -> Iterator[Check]:
    compared: dict[str, float] = {}
    by_chance: set[str] = set()
    apart_at_most = 0.0
    seen = [each for each in zip(ours, expected, strict=False) if differs is None or each[0].number < differs.step]
    if not seen:
        return
    for number, (mine, theirs) in enumerate(seen):
        gaps = weights_apart(mine.after, theirs.after, theirs.before)
        limits = {name: noise.update_limit(number, name, theirs) for name in gaps}
        whole = norm_of(theirs.gradients)
        for name, gap in gaps.items():
            gradient = theirs.gradients.get(name)
            if gradient is not None and float(gradient.float().norm()) <= NOTHING * whole:
                by_chance.add(name)  # nothing but rounding, so that its way is chance
                continue
            if not gap <= limits[name] <= PROVES and gap > limits[name]:
                bad = [each for each in gaps if gaps[each] > limits[each]]
                text = (
                    f"step {mine.number}, from the same weights, moments and gradients: {len(bad)} of {len(gaps)} weights are "
                    f"moved otherwise; first {module_of(name)}, by {figure(gap)} of its way where rounding explains "
                    f"{figure(limits[name])}"
                )
                yield _failed(UPDATES, Finding(Cause.SOME_RANKS_UPDATE, text, name, step=mine.number, amount=gap))
                return
            if limits[name] <= PROVES:
                compared[name] = max(compared.get(name, 0.0), limits[name])
                apart_at_most = max(apart_at_most, gap)
    lacking = [
        name for name in expected[0].after if name not in {*compared, *by_chance} and name in expected[0].gradients
    ]
    limit = max(compared.values(), default=noise.whole_limit(noise.whole_update))
    text = (
        f"{len(compared)} parameters in {len(seen)} steps: largest difference {figure(apart_at_most)} of the way that a step "
        f"takes them; rounding explains up to {figure(limit)}"
    )
    if lacking:
        limit = noise.whole_limit(noise.whole_update)
        text += f"; {listed(lacking)} only together with all others, where it explains {figure(limit)}"
    yield _answer(UPDATES, text, limit, "the update")


def _answer(name: str, text: str, limit: float, of: str) -> Check:
    if limit <= PROVES:
        return passed("parity", name, text)
    return unproved(
        "parity",
        name,
        text,
        f"Rounding may explain {limit:.0%} of {of}: a mistake of that size would not be seen. To be proved, it must be at most "
        f"{PROVES:.0%}. More samples per micro-batch or a wider precision bring it down",
    )
