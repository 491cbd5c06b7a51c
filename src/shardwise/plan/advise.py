"""Which strategy suits this model and these devices, and why, in a few sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from shardwise.config import Training
from shardwise.errors import ConfigError
from shardwise.parallel.advice import Machines, Question, Suggestion
from shardwise.parallel.memory import ModelSizes, StateBytes, gib
from shardwise.parallel.strategy import built_in_strategies
from shardwise.tasks import Task

FOR_ACTIVATIONS = 0.4
"""The share of a device's memory that is left for activations and fragments: less makes for tiny batches."""
MOST_TENSOR = 8
"""Devices that share a matrix: every layer waits for all of them, so more than the usual machine has is slow."""


@dataclass(frozen=True)
class Advice:
    strategy: str
    """As the strategy calls it: its name, or its way to shard; or none, where nothing will do."""
    reasons: list[str]
    lines: list[str]
    """What to write into the block `training`; nothing where nothing will do."""
    table: dict[str, StateBytes] = field(default_factory=dict)
    splits_blocks: bool = False
    """The task must say how its matrices are split."""


def advise(
    sizes: ModelSizes, training: Training, machines: Machines, tensor_sizes: Sequence[int] | None = None
) -> Advice:
    """The plainest that fits: a whole copy per device, then sharding as far as it is needed, then less speed.

    `tensor_sizes`: those that the model can be split by; None: any that the machines have room for.
    """
    question = Question(sizes, machines, divisors(machines) if tensor_sizes is None else tensor_sizes)
    every = [each for strategy in built_in_strategies(training) for each in strategy.suggestions(question)]
    known = sorted((each for each in every if each.held is not None), key=lambda each: each.order)
    table = {each.name: each.held for each in known if each.held is not None}
    room = machines.memory * (1 - FOR_ACTIVATIONS)
    fits = [each for each in known if table[each.name].total <= room]
    chosen, reasons = _choose(question, known, fits, room, [each for each in every if each.held is None])
    if chosen is None:
        return Advice("none", reasons, [], table)
    lines = chosen.lines_if_tight if chosen.lines_if_tight and fits == [chosen] else chosen.lines
    return Advice(chosen.name, reasons, lines, table, chosen.splits_blocks)


def divisors(machines: Machines) -> list[int]:
    """How many devices of a machine may share every matrix, as far as the machines are concerned."""
    return [size for size in range(2, min(MOST_TENSOR, machines.per_node) + 1) if machines.per_node % size == 0]


def tensor_sizes_of(task: Task, model: nn.Module, machines: Machines) -> list[int] | None:
    """Of those, the ones that the task's own plan accepts: its heads must divide, for example. None: it has no plan."""
    accepted = []
    for size in divisors(machines):
        try:
            if task.tensor_plan(model, size, False) is None:
                return None
        except ConfigError:
            continue
        accepted.append(size)
    return accepted


def _choose(
    question: Question, known: list[Suggestion], fits: list[Suggestion], room: float, ways_out: list[Suggestion]
) -> tuple[Suggestion | None, list[str]]:
    """`known`: the plainest first."""
    plainest, machines = known[0], question.machines
    assert plainest.held is not None
    size = f"weights, gradients and optimizer state of {question.sizes.parameters:,} parameters"
    share = f"{1 - FOR_ACTIVATIONS:.0%} of a device's {gib(machines.memory)}"
    whole = f"{size} are {gib(plainest.held.total)}: a whole copy"
    if plainest in fits:
        reasons = [f"{whole} fits into {share}, which leaves the rest to activations."]
        return plainest, [*reasons, *([plainest.why] if plainest.why else [])]
    reasons = [f"{whole} does not fit into {share}."]
    if not fits:
        return _way_out(question, known[-1], room, reasons, ways_out)
    chosen = min(
        (each for each in fits if each.preferred is not None), key=lambda each: each.preferred or 0, default=fits[0]
    )
    return chosen, [*reasons, chosen.why]


def _way_out(
    question: Question, least: Suggestion, room: float, reasons: list[str], ways_out: list[Suggestion]
) -> tuple[Suggestion | None, list[str]]:
    """`least`: what needs least memory of all that do not fit."""
    machines, state = question.machines, least.held
    assert state is not None
    if state.gathered > room:
        reasons.append(
            f"One block alone is {gib(state.gathered / 2)} when gathered: it must be split itself, by strategy tensor within a "
            "machine."
        )
        if split := next((each for each in ways_out if each.splits_blocks), None):
            return split, reasons
        tried = divisors(machines)
        reasons.append(
            f"But the model cannot be split by {' or '.join(map(str, tried))}, as many devices of a machine as could share "
            "it: change its number of heads, or the number of devices per machine."
            if tried
            else "But no machine has two devices that could share it."
        )
        return None, reasons
    needed = -(-int(state.total - state.gathered) * machines.devices // max(1, int(room - state.gathered)))
    reasons.append(
        f"Fully sharded over {machines.devices} device(s) it is still {gib(state.total)} each: it needs about {needed} such "
        "devices, or fsdp with cpu_offload, which keeps the state in host memory and is slow."
    )
    return next((each for each in ways_out if not each.splits_blocks), None), reasons
