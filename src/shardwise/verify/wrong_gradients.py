"""Why gradients are wrong: causes are told apart by experiments."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from shardwise.verify.by_hand import SPLIT_MATTERS, Gradients
from shardwise.verify.causes import Cause
from shardwise.verify.compared import Compared
from shardwise.verify.contents import first_difference
from shardwise.verify.formatting import figure, listed, module_of
from shardwise.verify.measure import SMALL_SHARE, apart, floor_of, gradients_apart, norm_of, together
from shardwise.verify.probe import Probe, Share
from shardwise.verify.report import Finding


def why(both: Compared, differences: dict[str, float], bad: dict[str, float]) -> Finding:
    """The gradients that each mistake would have given are known from the probe: which of them are these?"""
    first = next(iter(bad))
    text = (
        f"step 1: {len(bad)} of {len(differences)} gradients differ; first {module_of(first)}, by {figure(bad[first])} "
        f"where rounding explains {figure(both.gradient_limit(first))}"
    )
    gathers = both.probe.plan.gathers
    if _split_explains(both) and not both.split and not gathers:
        text += (
            f". In one process, splitting the same batch into the ranks' micro-batches moves the gradient by "
            f"{figure(both.probe.split_matters_without_batch_norm)}"
        )
        if hooked := both.probe.split_matters_by_hooks:
            text += (
                f", and without the hooks on {listed(hooked)} not at all: a hook meets each micro-batch's own gradient"
            )
            return Finding(Cause.CLIPPED_BEFORE_REDUCED, text, hooked[0], step=1, amount=bad[first])
        return Finding(Cause.LOSS_IS_NO_SUM, text, first, step=1, amount=bad[first])
    if data := read_differently(both.probe, both.ranks.records, both.reference_record):
        return data
    near = max(20 * floor_of(both.probe.precision), 1e-4)
    for cause, story, wrong in () if gathers else _mistakes(both.probe):
        gap = _distance(both.run.gradients, wrong())
        if gap < near:
            return Finding(cause, f"{text}. They are, to {figure(gap)}, {story}", first, step=1, amount=bad[first])
    if (buffers := both.probe.buffers_in_gradient) and not both.split:
        text += f". The gradient depends on {listed(buffers)}, which every forward pass moves: on the ranks by other samples"
        return Finding(Cause.OWN_BUFFERS, text, buffers[0], step=1, amount=bad[first])
    ratio = common_ratio(both.run.gradients, both.reference.gradients)
    if ratio is not None:
        return Finding(
            Cause.WRONG_SCALING, f"{text}. All are {ratio:.6g} times what they should be", first, step=1, amount=ratio
        )
    if gathers:
        text += _gathered(both)
    elif odd := _on_some_ranks(both, text, bad):
        return odd
    elif (found := _as_weighted_sum(both, near)) is not None:
        return Finding(found[0], f"{text}. {found[1]}", first, step=1, amount=bad[first])
    whole = norm_of(both.reference.gradients)
    counts = [
        name for name, each in both.reference.gradients.items() if float(each.float().norm()) > SMALL_SHARE * whole
    ]
    if counts and set(counts) <= set(bad):
        text += ". It is so for every parameter that counts, and on every rank"
        return Finding(Cause.ALL_GRADIENTS, text, first, step=1, amount=bad[first])
    if len(bad) < len(differences):
        text += f". The other {len(differences) - len(bad)} are right; wrong are {listed(list(bad))}"
    return Finding(Cause.GRADIENTS, text, first, step=1, amount=bad[first])


def _split_explains(both: Compared) -> bool:
    """It is more than rounding that splitting the batch does in one process; or more than is measured, and like what is wrong."""
    split, gap = both.probe.split_matters_without_batch_norm, together(both.run.gradients, both.reference.gradients)
    return split > SPLIT_MATTERS or split > max(both.tolerance.whole_gradient, gap / 3)


def _gathered(both: Compared) -> str:
    """What is wrong with a loss over the rows of all ranks, as its value tells."""
    ours, expected = both.run.curve.losses[0], both.reference.curve.losses[0]
    if apart(ours, expected) > both.tolerance.losses[0]:
        return (
            f". The loss gathers the rows of all ranks, and its value is {ours:.6g} where one process has {expected:.6g}: a "
            "rank's rows stand at `own` among the gathered ones, and labels count from there; sums and counts are to be "
            "gathered, not means; and what is returned is the sum over a rank's own samples"
        )
    return (
        ". The loss gathers the rows of all ranks; its value is right, so what is wrong goes back through the gathered rows: "
        "detach(), .data or no_grad() on them, or a gather other than shardwise.gather_batch"
    )


def read_differently(
    probe: Probe, records: Sequence[dict[str, Any]], alone: dict[str, Any] | None = None
) -> Finding | None:
    """Whether the samples of the first step are other ones in other processes: to be asked when gradients differ. `alone`: of
    one more process without other ranks."""
    for rank, record in enumerate(records):
        for ids, found in record["inputs"].items():
            if ids in probe.inputs and (place := first_difference(probe.inputs[ids], found)):
                who = f"rank {rank}" if len(records) > 1 else "the next process"
                text = f"step 1: {who} has read samples {listed(ids)}, as one process did before it, and {place} is another"
                if alone and any(probe.inputs.get(each) == inputs for each, inputs in alone["inputs"].items()):
                    text += ". Another process without other ranks reads what the first one did"
                    return Finding(Cause.DATA_BY_RANK, text, rank=rank, step=1)
                return Finding(Cause.DATA_CHANGE, text, rank=rank, step=1)
    return None


def _on_some_ranks(both: Compared, text: str, bad: dict[str, float]) -> Finding | None:
    """Each rank's gradients of its own samples, before they were averaged, beside those of one process on these samples."""
    probe, world = both.probe, both.probe.plan.batching.world
    own = [record["own_gradients"] for record in both.ranks.records]
    if not probe.shares or len(own) != world or not all(own):
        return None
    near = max(4 * floor_of(probe.precision), 1e-4)
    if _distance(both.run.gradients, _weighted_sum(own, 1 / world)) > near:
        return None  # what was caught is not what came out: it explains nothing
    parts = [[part for part in probe.shares if part.rank == rank] for rank in range(world)]
    expected = [_weighted(mine, [world / probe.count] * len(mine)) for mine in parts]
    for name in bad:
        givers = [rank for rank in range(world) if _size(own[rank], name)]
        should = [rank for rank in range(world) if _size(expected[rank], name)]
        if givers and givers != should:
            without = [rank for rank in range(world) if rank not in givers and parts[rank]]
            if not without:
                continue
            process = f"gets one from the samples of {_ranks(should)}" if should else "gets none at all"
            text += (
                f". Before gradients are averaged, {name} has one on {_ranks(givers)} only and none on {_ranks(without)}; "
                f"one process {process}"
            )
            return Finding(Cause.ONE_SIDED_PARAMETER, text, name, without[0], 1, bad[name])
    off = [_worst_off(mine, theirs, probe.gradients) for mine, theirs in zip(own, expected, strict=True)]
    wrong = [rank for rank in range(world) if off[rank][1] > near]
    right = [rank for rank in range(world) if rank not in wrong]
    if not wrong or not right:
        return None
    name, gap = off[wrong[0]]
    text += (
        f". Before gradients are averaged, those of {_ranks(wrong)} are not what one process gets from the same samples "
        f"({name}: {figure(gap)} apart), those of {_ranks(right)} are"
    )
    return Finding(Cause.RANKS_COMPUTE_DIFFERENTLY, text, name, wrong[0], 1, gap)


def _as_weighted_sum(both: Compared, near: float) -> tuple[Cause, str] | None:
    """Whether the gradient is a sum of the micro-batches' own, with weights that are not alike; and what the weights tell."""
    parts, count = both.probe.shares, both.probe.count
    if len(parts) < 2:
        return None
    names = [name for name in both.run.gradients if any(name in part.gradients for part in parts)]
    zero = {name: torch.zeros_like(both.run.gradients[name]).float() for name in names}
    columns = [
        torch.cat([(part.gradients.get(name, zero[name]) / count).flatten().double() for name in names])
        for part in parts
    ]
    observed = torch.cat([both.run.gradients[name].float().flatten().double() for name in names])
    matrix = torch.stack(columns, dim=1)
    weights = torch.linalg.lstsq(matrix, observed[:, None]).solution.flatten()
    if not float((matrix @ weights - observed).norm()) <= 10 * near * float(observed.norm()):
        return None
    told = ", ".join(
        f"rank {part.rank}, micro-batch {part.micro + 1}: {float(weight):.3g}"
        for part, weight in list(zip(parts, weights, strict=True))[:8]
    )
    sums = {part.rank: torch.zeros_like(observed) for part in parts}
    by_rank: dict[int, list[float]] = {}
    for part, weight, column in zip(parts, weights, columns, strict=True):
        sums[part.rank] += column
        by_rank.setdefault(part.rank, []).append(float(weight))
    alike = all(max(mine) - min(mine) < 1e-2 * abs(mine[0]) for mine in by_rank.values())
    small = [rank for rank, mine in by_rank.items() if mine[0] < 0.99]
    left = [by_rank[rank][0] * float(sums[rank].norm()) for rank in small]
    if alike and len(small) > 1 and max(left) - min(left) < 1e-2 * max(left):
        text = f"What {_ranks(small)} gave has the same norm on each, {left[0]:.3g}, though their gradients have not"
        return Cause.CLIPPED_BEFORE_REDUCED, text
    return Cause.UNEVEN_WEIGHTS, f"They are the micro-batches' own, added up with other weights than 1: {told}"


def _weighted_sum(all_of: Sequence[Gradients], weight: float) -> Gradients:
    names = dict.fromkeys(name for each in all_of for name in each)
    return {name: torch.stack([each[name] for each in all_of if name in each]).sum(0) * weight for name in names}


def _size(gradients: Gradients, name: str) -> float:
    return float(gradients[name].norm()) if name in gradients else 0.0


def _worst_off(own: Gradients, expected: Gradients, whole: Gradients) -> tuple[str, float]:
    """The parameter whose gradient is furthest from what is expected, and how far, beside that of the whole batch."""
    gaps = gradients_apart(own, expected) if expected else {name: _size(own, name) for name in own}
    gaps = {name: gap for name, gap in gaps.items() if name in whole}
    name = max(gaps, key=lambda each: gaps[each], default="")
    return name, gaps.get(name, 0.0)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {listed(ranks)}"


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


def common_ratio(one: Gradients, other: Gradients) -> float | None:
    """The factor between the two, if it is the same for every parameter that counts, and all there is to their difference."""
    flat = [torch.cat([each[name].float().flatten() for name in other if name in one]) for each in (one, other)]
    ratio = float(flat[0] @ flat[1] / (flat[1] @ flat[1]))
    left = float((flat[0] - ratio * flat[1]).norm()) / float(flat[1].norm())
    return ratio if left < min(1e-3 * abs(ratio), 0.1 * abs(ratio - 1)) else None
