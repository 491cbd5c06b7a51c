"""Evaluation: each sample counted exactly once, on any number of ranks. What training draws next is not changed by it, nor which
modules are in training mode."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from shardwise.config import Training
from shardwise.config.registry import nearest
from shardwise.config.seeds import Purpose
from shardwise.data import StepBatch
from shardwise.data.loader import MicroBatch
from shardwise.data.seeding import all_generators_kept, seed_everything
from shardwise.engine.parts import Parts
from shardwise.errors import ConfigError, ShardwiseError
from shardwise.parallel.gather import Scope, gathering
from shardwise.tasks import Loss, Rows, Task
from shardwise.tasks.base import overridden_below
from shardwise.watch.heartbeats import Phase, beat

Results = Mapping[str, Loss | Rows]


def run_evaluation(
    parts: Parts,
    batches: Iterable[StepBatch],
    pictures: Path,
    step: int,
    stop: Callable[[], bool] = lambda: False,
    seen: Callable[[MicroBatch, Results], None] = lambda micro, results: None,
) -> dict[str, float] | None:
    """Averages over all samples of all ranks: sums and counts are added up, and divided once. Rows are studied whole.

    `stop`: whether this rank was asked to leave. They agree on it before every batch; None: they gave it up. `seen`: called with
    what each micro-batch gave.
    """
    model = parts.strategy.model
    sums: dict[str, float] = defaultdict(float)
    counts: dict[str, float] = defaultdict(float)
    rows: dict[str, list[Rows]] = defaultdict(list)
    strategy = parts.strategy
    with (
        _evaluating(model, parts),
        torch.no_grad(),
        strategy.computing(),
        gathering(Scope(strategy.layout, cuts_rows=strategy.cuts_rows)) as scope,
    ):
        beat(Phase.EVALUATE, step)
        for batch in batches:
            if parts.world.sum(stop())[0]:
                return None
            for micro in batch.micro:
                beat(Phase.EVALUATE, step)
                scope.borrowed = micro.request.borrowed
                with parts.precision.autocast():
                    results = parts.task.evaluate(model, micro.inputs)
                # A borrowed sample belongs to another rank, which counts it.
                own = strategy.layout.counts and not micro.request.borrowed
                for name, result in results.items():
                    if isinstance(result, Rows):
                        rows[name] += [_on_host(result)] if own else []
                    elif isinstance(result, Loss):
                        sums[name] += float(result.sum) if own else 0.0
                        counts[name] += float(result.count) if own else 0.0
                    else:
                        raise ShardwiseError(
                            f"the task's evaluate() gave {type(result).__name__} for {name!r}, "
                            "not a Loss(sum, count) or Rows(keys, columns)"
                        )
                seen(micro, results)
    return _averages(parts, sums, counts) | _studied(parts, rows, pictures, step)


def check_monitor(task: Task, training: Training) -> None:
    """Before the run, as far as the task says what its evaluation gives. Where it does not, the first evaluation shows it."""
    if overridden_below(task, "metric_names", ("evaluate", "study", "derived_metrics")):
        return
    if (unknown := unknown_monitor(training.monitor, task.metric_names())) is not None:
        raise ConfigError(unknown)


def unknown_monitor(monitor: str, names: Collection[str]) -> str | None:
    """What is wrong with it, if it is none of these names."""
    if monitor in names:
        return None
    near = nearest(monitor, names)
    hint = f". Nearest: {near}" if near else ""
    return f"training.monitor: {monitor!r} is not a metric of this task; there is {', '.join(names)}{hint}"


@contextmanager
def _evaluating(model: nn.Module, parts: Parts) -> Iterator[None]:
    """Whatever is drawn here is the same in each evaluation. A module that was in evaluation mode all along stays there."""
    modes = [(module, module.training) for module in model.modules()]
    with all_generators_kept(parts.world.device):
        seed_everything(parts.config.seed, Purpose.EVALUATE, parts.strategy.layout.random_rank)
        model.eval()
        try:
            yield
        finally:
            if modes[0][1]:
                model.train()  # a model may do something when it is told, such as take merged weights apart again
            for module, training in modes:
                module.training = training


def _averages(parts: Parts, sums: dict[str, float], counts: dict[str, float]) -> dict[str, float]:
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


def _studied(parts: Parts, mine: dict[str, list[Rows]], pictures: Path, step: int) -> dict[str, float]:
    everyone = parts.world.gather_tensors(_named({name: _joined(rows) for name, rows in mine.items() if rows}))
    by_name: dict[str, list[Rows]] = defaultdict(list)
    for rank in everyone:
        for name, rows in _rows(rank).items():
            by_name[name].append(rows)
    if not by_name:
        return {}
    together = {name: _in_order(_joined(by_name[name])) for name in sorted(by_name)}
    found: dict[str, float] = parts.world.on_first(
        lambda: {name: float(value) for name, value in parts.task.study(together, pictures, step).items()}
    )
    return found


def _named(rows: dict[str, Rows]) -> dict[str, torch.Tensor]:
    """One name for each tensor, of that of the rows and that of the column; the keys are the column without one."""
    return {
        json.dumps([name, column]): tensor
        for name, each in rows.items()
        for column, tensor in [(None, each.keys), *each.columns.items()]
    }


def _rows(tensors: dict[str, torch.Tensor]) -> dict[str, Rows]:
    """Back again."""
    columns: dict[str, dict[str | None, torch.Tensor]] = defaultdict(dict)
    for key, tensor in tensors.items():
        name, column = json.loads(key)
        columns[name][column] = tensor
    return {
        name: Rows(each[None], {column: tensor for column, tensor in each.items() if column is not None})
        for name, each in columns.items()
    }


def _joined(parts: list[Rows]) -> Rows:
    columns = {name: torch.cat([part.columns[name] for part in parts]) for name in parts[0].columns}
    return Rows(torch.cat([part.keys for part in parts]), columns)


def _in_order(rows: Rows) -> Rows:
    order = rows.keys.argsort()
    return Rows(rows.keys[order], {name: column[order] for name, column in rows.columns.items()})


def _on_host(rows: Rows) -> Rows:
    return Rows(rows.keys.cpu(), {name: column.cpu() for name, column in rows.columns.items()})
