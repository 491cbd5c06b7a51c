"""Evaluation: each sample counted exactly once, on any number of ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch

from shardwise.data import StepBatch
from shardwise.engine.step import Parts
from shardwise.errors import ShardwiseError
from shardwise.tasks import Loss


def run_evaluation(parts: Parts, batches: Iterable[StepBatch]) -> dict[str, float]:
    """Averages over all samples of all ranks: sums and counts are added up, and divided once."""
    model = parts.spread.model
    model.eval()
    sums: dict[str, float] = defaultdict(float)
    counts: dict[str, float] = defaultdict(float)
    with torch.no_grad():
        for batch in batches:
            for micro in batch.micro:
                with parts.precision.autocast():
                    metrics = parts.task.evaluate(model, micro.inputs)
                for name, metric in metrics.items():
                    if not isinstance(metric, Loss):
                        raise ShardwiseError(
                            f"the task's evaluate() gave {type(metric).__name__} for {name!r}, not a Loss(sum, count)"
                        )
                    # A borrowed sample belongs to another rank, which counts it.
                    own = not micro.request.borrowed
                    sums[name] += float(metric.sum) if own else 0.0
                    counts[name] += float(metric.count) if own else 0.0
    model.train()
    names = sorted(sums)
    everyone = parts.world.gather(names)
    if any(other != names for other in everyone):
        raise ShardwiseError(f"the ranks' evaluate() returned different metrics: {everyone}")
    totals = parts.world.sum(*(sums[name] for name in names), *(counts[name] for name in names))
    averages = {
        name: totals[index] / totals[index + len(names)]
        for index, name in enumerate(names)
        if totals[index + len(names)]
    }
    return averages | parts.task.derived_metrics(averages)
