"""Why gradients are wrong: causes are told apart by experiments."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch

from shardwise.verify.causes import Cause
from shardwise.verify.compared import Compared
from shardwise.verify.measure import floor_of
from shardwise.verify.probe import SPLIT_MATTERS, Gradients, Probe, Share
from shardwise.verify.report import Finding
from shardwise.verify.words import figure, listed, module_of


def why(both: Compared, differences: dict[str, float], bad: dict[str, float]) -> Finding:
    """The gradients that each mistake would have given are known from the probe: which of them are these?"""
    first = next(iter(bad))
    text = (
        f"step 1: {len(bad)} of {len(differences)} gradients differ; first {module_of(first)}, by {figure(bad[first])} "
        f"where rounding explains {figure(both.gradient_limit(first))}"
    )
    if both.probe.split_matters_without_batch_norm > SPLIT_MATTERS and not both.split:
        text += (
            f". In one process, splitting the same batch into the ranks' micro-batches moves the gradient by "
            f"{figure(both.probe.split_matters_without_batch_norm)}"
        )
        return Finding(Cause.LOSS_IS_NO_SUM, text, first, step=1, amount=bad[first])
    near = max(20 * floor_of(both.probe.precision), 1e-4)
    for cause, story, wrong in _mistakes(both.probe):
        gap = _distance(both.run.gradients, wrong())
        if gap < near:
            return Finding(cause, f"{text}. They are, to {figure(gap)}, {story}", first, step=1, amount=bad[first])
    ratio = _common_ratio(both.run.gradients, both.reference.gradients)
    if ratio is not None:
        return Finding(
            Cause.WRONG_SCALING, f"{text}. All are {ratio:.6g} times what they should be", first, step=1, amount=ratio
        )
    if len(bad) < len(differences):
        text += f". The other {len(differences) - len(bad)} are right; wrong are {listed(list(bad))}"
    return Finding(Cause.GRADIENTS, text, first, step=1, amount=bad[first])


def _mistakes(probe: Probe) -> Iterator[tuple[Cause, str, Callable[[], Gradients]]]:
    """Mistakes that people make, and the gradients of the first batch that each gives."""
    parts, batching = probe.shares, probe.plan.batching
    if not parts:
        return
    ranks, rounds = batching.world, 1 + max(part.micro for part in parts)
    per_rank = [sum(part.count for part in parts if part.rank == rank) or 1 for rank in range(ranks)]
    last = rounds - 1

    def combine(weight: Callable[[Share], float]) -> Callable[[], Gradients]:
        return lambda: _weighted(parts, [weight(part) for part in parts])

    yield (
        Cause.SCALED_BY_WORLD,
        f"1/{ranks} of what they should be, as when the average over {ranks} ranks is not made up for",
        combine(lambda part: 1 / probe.count / ranks),
    )
    yield (
        Cause.SCALED_BY_WORLD,
        f"{ranks} times what they should be, as when gradients are added up instead of averaged",
        combine(lambda part: ranks / probe.count),
    )
    yield (
        Cause.MEAN_OF_MEANS,
        "the average over ranks of each rank's own mean loss",
        combine(lambda part: 1 / per_rank[part.rank] / ranks),
    )
    yield (
        Cause.MEAN_OF_MEANS,
        "the average over micro-batches of each one's own mean loss",
        combine(lambda part: 1 / max(1, part.count) / ranks / rounds),
    )
    yield (
        Cause.MEAN_OF_MEANS,
        "the sum over micro-batches, averaged over ranks, of each one's own mean loss",
        combine(lambda part: 1 / max(1, part.count) / ranks),
    )
    yield (
        Cause.MEAN_OF_MEANS,
        "the sum over ranks and micro-batches of each one's own mean loss",
        combine(lambda part: 1 / max(1, part.count)),
    )
    if rounds > 1:
        kept = sum(part.count for part in parts if part.micro != last)
        for divisor, how in ((probe.count, ""), (kept, ", divided by what is left")):
            yield (
                Cause.MICRO_BATCH_LOST,
                f"those without the last micro-batch of each rank{how}",
                combine(lambda part, d=divisor: (part.micro != last) / d),  # type: ignore[misc]
            )
        begun = sum(part.count for part in parts if part.micro)
        for divisor in (probe.count, begun or 1):
            yield (
                Cause.MICRO_BATCH_LOST,
                "those without the first micro-batch of each rank",
                combine(lambda part, d=divisor: (part.micro != 0) / d),  # type: ignore[misc]
            )
        yield (
            Cause.WRONG_SCALING,
            f"1/{rounds} of what they should be, as when accumulation divides once more",
            combine(lambda part: 1 / probe.count / rounds),
        )
    for rank in range(ranks):
        for weight, how in ((ranks / probe.count, ""), (1 / per_rank[rank], ", divided by its own count")):
            yield (
                Cause.ALL_UNSYNCHRONISED,
                f"those of rank {rank}'s own samples{how}",
                combine(lambda part, r=rank, w=weight: w * (part.rank == r)),  # type: ignore[misc]
            )


def _weighted(parts: Sequence[Share], weights: Sequence[float]) -> Gradients:
    total: Gradients = {}
    for part, weight in zip(parts, weights, strict=True):
        for name, each in part.gradients.items():
            total[name] = total[name] + weight * each if name in total else weight * each
    return total


def _distance(one: Gradients, other: Gradients) -> float:
    size = float(torch.stack([each.norm() for each in other.values()]).norm())
    gap = torch.stack([(one[name].float() - each).norm() for name, each in other.items() if name in one]).norm()
    return float(gap) / size if size else math.inf


def _common_ratio(one: Gradients, other: Gradients) -> float | None:
    """The factor between the two, if it is the same for every parameter that counts."""
    flat = [torch.cat([each[name].float().flatten() for name in other if name in one]) for each in (one, other)]
    ratio = float(flat[0] @ flat[1] / (flat[1] @ flat[1]))
    return ratio if float((flat[0] - ratio * flat[1]).norm()) < 1e-3 * abs(ratio) * float(flat[1].norm()) else None
