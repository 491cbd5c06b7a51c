"""How far two runs are apart, and how far rounding alone may bring them.

The tolerance is measured, by one process, which cannot have the mistakes of many: it runs again with the samples of each
batch in another order, another number of threads, and its weights changed in the last digit before every step. What that moves,
rounding moves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from shardwise.kernels.types import COMPUTE_TYPES

FACTOR = 20.0
"""Two runs may be this many times as far apart as the reference is from itself."""
NARROW_FACTOR = 3.0
"""The same in bf16 and fp16, where what changes a weight in its last digit is larger than the errors of the sums: those are
made in fp32."""
ULPS = 8.0
"""The tolerance is never below this many units in the last place of fp32, or one of a narrow type: its sums are made in fp32."""
PROVES = 0.05
"""The share of what is compared that rounding may explain at most. A check with a larger tolerance proves nothing."""
SAME_COMPUTATION = 1e-2
"""A model that is further from itself in double precision computes something else there."""
NOTHING = 1e-6
"""A gradient smaller than this share of the whole is nothing but rounding; where it leads a weight to is chance."""
SMALL_SHARE = 1e-3
"""A gradient smaller than this share of the whole is measured against the whole: it may be nothing but rounding."""


def left_open(gap: float, limit: float, floor: float) -> float:
    """How large a mistake may hide in what rounding explains. None does where two runs agree to the last digits, whatever
    rounding might have done: it does not make up for a mistake by chance."""
    return floor if gap <= floor else limit


def floor_of(precision: str) -> float:
    kind = COMPUTE_TYPES.get(precision)
    return ULPS * torch.finfo(torch.float32).eps if kind is None else torch.finfo(kind).eps


def factor_of(precision: str) -> float:
    return NARROW_FACTOR if is_narrow(precision) else FACTOR


def rounding_of(precision: str) -> float:
    """The relative error of one rounding in the type that the arithmetic runs in; in fp32, of a sum of a few."""
    kind = COMPUTE_TYPES.get(precision)
    return torch.finfo(torch.float32).eps if kind is None else torch.finfo(kind).eps / 2


def is_narrow(precision: str) -> bool:
    return precision in COMPUTE_TYPES


@dataclass
class Curve:
    """What a run did, step by step, as all ranks together."""

    losses: list[float]
    norms: list[float]
    rates: list[float]
    ids: list[list[int]]
    counts: list[int]
    """What the loss was divided by."""

    @classmethod
    def of(cls, ranks: Sequence[Sequence[Mapping[str, Any]]]) -> Curve:
        first = ranks[0]
        together = zip(*ranks, strict=False)
        return cls(
            [row["loss"] for row in first],
            [row["grad_norm"] for row in first],
            [row["lr"] for row in first],
            [sorted(index for row in rows for index in row["ids"]) for rows in together],
            [row["global_count"] for row in first],
        )


def apart(one: float, other: float) -> float:
    """Relative to the second."""
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.inf
    return abs(one - other) / max(abs(other), 1e-30)


def gradients_apart(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> dict[str, float]:
    """By parameter: the 2-norm of the difference over that of the second; in the order of the model."""
    if not other:
        return {}
    whole = float(torch.stack([each.float().norm() for each in other.values()]).norm())
    found = {}
    for name, each in other.items():
        size = max(float(each.float().norm()), SMALL_SHARE * whole, 1e-30)
        found[name] = float((one[name].float() - each.float()).norm()) / size if name in one else math.inf
    return found | {name: math.inf for name in one if name not in other}


def weights_apart(
    one: Mapping[str, Tensor], other: Mapping[str, Tensor], start: Mapping[str, Tensor]
) -> dict[str, float]:
    """By parameter: the 2-norm of the difference over the way that training has taken it so far."""
    found = {}
    for name, each in other.items():
        gap = float((one[name].float() - each.float()).norm()) if name in one else math.inf
        way = _way(each, start[name])
        found[name] = gap / way if way else (0.0 if not gap else math.inf)
    return found


def _way(weight: Tensor, start: Tensor) -> float:
    """The last digits of the weight itself are counted with it: a frozen weight has taken none."""
    digits = torch.finfo(weight.dtype).eps if weight.is_floating_point() else 0.0
    return float((weight.float() - start.float()).norm()) + ULPS * digits * float(weight.float().norm())


@dataclass
class Tolerance:
    """Measured: for every quantity what rounding explains."""

    floor: float
    losses: list[float]
    """By step: noise grows on the way."""
    norms: list[float]
    gradients: dict[str, float]
    whole_gradient: float
    """Of all parameters together."""
    weights: dict[int, dict[str, float]]
    """By step, and by parameter."""
    largest_noise: float
    """Of the gradients: the figure that tells whether anything can be proved at all."""

    @property
    def loss(self) -> float:
        return max(self.losses, default=self.floor)

    @property
    def norm(self) -> float:
        return max(self.norms, default=self.floor)

    @classmethod
    def measured(
        cls,
        reference: Figures,
        others: Sequence[Figures],
        precision: str,
        start: Mapping[str, Tensor],
        exact: Mapping[str, Tensor],
    ) -> Tolerance:
        """`exact`: the gradients of step 1 in double precision, where there are any."""
        floor, factor = floor_of(precision), factor_of(precision)
        grads = [gradients_apart(other.gradients, reference.gradients) for other in others]
        loudest = max((value for each in grads for value in each.values()), default=0.0)
        if exact and not is_narrow(
            precision
        ):  # of a narrow type, it is far less than what a change of last digits does
            error = gradients_apart(reference.gradients, exact)
            if max(error.values()) < SAME_COMPUTATION:
                grads.append(error)
        whole = [together(other.gradients, reference.gradients) for other in others]

        def limits_of_weights(step: int) -> dict[str, float]:
            weights = reference.weights[step]
            noise = [weights_apart(other.weights[step], weights, start) for other in others if step in other.weights]
            limits = _by_parameter(noise, floor, factor, together=is_narrow(precision))
            if is_narrow(precision):  # there, rounding moves far more than last digits
                return limits
            return {name: max(limit, last_digits(weights[name], start[name])) for name, limit in limits.items()}

        def limits_of_curve(of: Callable[[Curve], list[float]]) -> list[float]:
            pairs = [[apart(a, b) for a, b in zip(of(o.curve), of(reference.curve), strict=False)] for o in others]
            by_step = [max(gaps) for gaps in zip(*pairs, strict=False)]
            return [max(floor, factor * largest) for largest in accumulate(by_step, max)]

        return cls(
            floor,
            limits_of_curve(lambda curve: curve.losses),
            limits_of_curve(lambda curve: curve.norms),
            _by_parameter(grads, floor, factor, together=is_narrow(precision)),
            factor * max(whole, default=0.0),
            {step: limits_of_weights(step) for step in reference.weights},
            loudest,
        )


def together(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """The 2-norm of the difference of all parameters over that of the second."""
    size = math.hypot(*(float(each.float().norm()) for each in other.values()))
    gap = math.hypot(*(float((one[name].float() - each.float()).norm()) for name, each in other.items() if name in one))
    return gap / size if size else 0.0


def norm_of(tensors: Mapping[str, Tensor]) -> float:
    """The 2-norm of all of them together."""
    return math.hypot(*(float(each.float().norm()) for each in tensors.values()))


def last_digits(weight: Tensor, start: Tensor) -> float:
    """What it makes of the way trained if the numbers of a weight are off in their last digits. A norm's weights are near 1 and
    move little: there that is more than `floor`, and it is chance whether the repeated runs differ in any."""
    if not weight.is_floating_point() or torch.equal(weight, start):  # a frozen weight stays as it is
        return 0.0
    return ULPS * torch.finfo(weight.dtype).eps * float(weight.float().norm()) / _way(weight, start)


def _by_parameter(noise: list[dict[str, float]], floor: float, factor: float, *, together: bool) -> dict[str, float]:
    """`together`: in a narrow type it is chance which parameter a rounding error hits, so all have the largest."""
    names = list(dict.fromkeys(name for each in noise for name in each))
    largest = {name: max(each.get(name, 0.0) for each in noise) for name in names}
    everywhere = max(largest.values(), default=0.0) if together else 0.0
    return {name: max(floor, factor * max(largest[name], everywhere)) for name in names}


@dataclass
class Figures:
    """The figures of one group of ranks, put together."""

    curve: Curve
    gradients: dict[str, Tensor]
    weights: dict[int, dict[str, Tensor]]
    """After each step; of a large model, after the last."""
    gradients_by_step: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    """Where they were kept."""

    @property
    def last_weights(self) -> dict[str, Tensor]:
        return self.weights[max(self.weights)]
