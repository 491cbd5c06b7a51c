"""Which strategy suits this model and these devices, and why, in a few sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from shardwise.config import Fsdp, Training
from shardwise.errors import ConfigError
from shardwise.parallel import strategy_class
from shardwise.parallel.memory import ModelSizes, StateBytes, gib
from shardwise.tasks import Task

FOR_ACTIVATIONS = 0.4
"""The share of a device's memory that is left for activations and fragments: less makes for tiny batches."""
MOST_TENSOR = 8
"""Devices that share a matrix: every layer waits for all of them, so more than the usual machine has is slow."""


@dataclass(frozen=True)
class Machines:
    devices: int
    """In total."""
    nodes: int
    memory: float
    """Bytes per device."""
    slow_network: bool = False
    """Between the machines."""


@dataclass(frozen=True)
class Advice:
    strategy: str
    """single, ddp, zero1, a sharding strategy of fsdp, cpu_offload, tensor; or none, where nothing will do."""
    reasons: list[str]
    lines: list[str]
    """What to write into the block `training`; nothing where nothing will do."""
    table: dict[str, StateBytes] = field(default_factory=dict)


def advise(
    sizes: ModelSizes, training: Training, machines: Machines, tensor_sizes: Sequence[int] | None = None
) -> Advice:
    """The plainest that fits: a whole copy per device, then sharding as far as it is needed, then less speed.

    `tensor_sizes`: those that the model can be split by; None: any that the machines have room for.
    """
    room = machines.memory * (1 - FOR_ACTIVATIONS)
    per_node = machines.devices // machines.nodes
    table = {
        name: state_bytes(sizes, training, name, per_node if name == "HYBRID_SHARD" else machines.devices)
        for name in _candidates(machines)
    }
    fits = [name for name, state in table.items() if state.total <= room]
    if tensor_sizes is None:
        tensor_sizes = divisors(machines)
    chosen, reasons = _choose(table, fits, machines, sizes, room, tensor_sizes)
    return Advice(chosen, reasons, _lines(chosen, fits, tensor_sizes), table)


def state_bytes(sizes: ModelSizes, training: Training, name: str, ranks: int) -> StateBytes:
    """What a device holds. `name`: a strategy, or one of fsdp's ways to shard, over so many ranks that share a model."""
    plain = training.model_copy(update={"fsdp": None, "num_nodes": 1})
    if name.isupper():
        options = Fsdp(sharding_strategy=name)  # type: ignore[arg-type]
        return strategy_class("fsdp")(plain.model_copy(update={"fsdp": options})).held_bytes(sizes, ranks)
    return strategy_class(name)(plain).held_bytes(sizes, ranks)


def divisors(machines: Machines) -> list[int]:
    """How many devices of a machine may share every matrix, as far as the machines are concerned."""
    per_node = machines.devices // machines.nodes
    return [size for size in range(2, min(MOST_TENSOR, per_node) + 1) if per_node % size == 0]


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


def _candidates(machines: Machines) -> list[str]:
    """From the plainest to the one that needs least memory."""
    if machines.devices == 1:
        return ["single"]
    several = ["HYBRID_SHARD"] if 1 < machines.nodes < machines.devices else []
    return ["ddp", "zero1", "SHARD_GRAD_OP", *several, "FULL_SHARD"]


def _choose(
    table: dict[str, StateBytes],
    fits: list[str],
    machines: Machines,
    sizes: ModelSizes,
    room: float,
    tensor_sizes: Sequence[int],
) -> tuple[str, list[str]]:
    plainest = next(iter(table))
    whole = table[plainest].total
    size = f"weights, gradients and optimizer state of {sizes.parameters:,} parameters"
    share = f"{1 - FOR_ACTIVATIONS:.0%} of a device's {gib(machines.memory)}"
    if plainest in fits:
        reasons = [f"{size} are {gib(whole)}: a whole copy fits into {share}, which leaves the rest to activations."]
        if plainest == "ddp":
            reasons.append(
                "ddp is then fastest: it only adds up gradients, while the backward pass still runs. For the largest batch, "
                "fsdp with gradient accumulation frees more memory."
            )
        return plainest, reasons
    reasons = [f"{size} are {gib(whole)}: a whole copy does not fit into {share}."]
    if not fits:
        return _nothing_fits(table, machines, room, reasons, tensor_sizes)
    if machines.slow_network and "HYBRID_SHARD" in fits:
        reasons.append(
            f"Sharded within a machine it is {gib(table['HYBRID_SHARD'].total)} per device, and only gradients cross the slow "
            "network: HYBRID_SHARD."
        )
        return "HYBRID_SHARD", reasons
    if "zero1" in fits and not machines.slow_network:
        reasons.append(
            f"Most of it is optimizer state: zero1 shards that alone, {gib(table['zero1'].total)} per device, and sends no more "
            "than ddp."
        )
        return "zero1", reasons
    chosen = next(name for name in ("SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD") if name in fits)
    reasons.append(f"Sharded ({chosen}) over {machines.devices} devices it is {gib(table[chosen].total)} per device.")
    return chosen, reasons


def _nothing_fits(
    table: dict[str, StateBytes], machines: Machines, room: float, reasons: list[str], tensor_sizes: Sequence[int]
) -> tuple[str, list[str]]:
    least = next(reversed(table))
    state = table[least]
    if state.gathered > room:
        reasons.append(
            f"One block alone is {gib(state.gathered / 2)} when gathered: it must be split itself, by strategy tensor within a "
            "machine."
        )
        if tensor_sizes:
            return "tensor", reasons
        tried = divisors(machines)
        reasons.append(
            f"But the model cannot be split by {' or '.join(map(str, tried))}, as many devices of a machine as could share "
            "it: change its number of heads, or the number of devices per machine."
            if tried
            else "But no machine has two devices that could share it."
        )
        return "none", reasons
    needed = -(-int(state.total - state.gathered) * machines.devices // max(1, int(room - state.gathered)))
    reasons.append(
        f"Fully sharded over {machines.devices} device(s) it is still {gib(state.total)} each: it needs about {needed} such "
        "devices, or fsdp with cpu_offload, which keeps the state in host memory and is slow."
    )
    return "cpu_offload", reasons


def _lines(chosen: str, fits: list[str], tensor_sizes: Sequence[int]) -> list[str]:
    if chosen == "none":
        return []
    if chosen in ("single", "ddp", "zero1"):
        return [f"strategy: {chosen}"]
    if chosen == "tensor":
        return ["strategy: tensor", f"tensor: {{size: {max(tensor_sizes)}}}"]
    if chosen == "cpu_offload":
        return ["strategy: fsdp", "fsdp: {cpu_offload: true, activation_checkpointing: true}"]
    extra = ", activation_checkpointing: true" if fits == ["FULL_SHARD"] else ""
    return ["strategy: fsdp", f"fsdp: {{sharding_strategy: {chosen}{extra}}}"]
