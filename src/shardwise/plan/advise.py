"""Which strategy suits this model and these devices, and why, in a few sentences."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardwise.config import Training
from shardwise.parallel.memory import ModelSizes, StateBytes, gib, state_bytes

FOR_ACTIVATIONS = 0.4
"""The share of a device's memory that is left for activations and fragments: less makes for tiny batches."""


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
    """single, ddp, zero1, or a sharding strategy of fsdp."""
    reasons: list[str]
    lines: list[str]
    """What to write into the block `training`."""
    table: dict[str, StateBytes] = field(default_factory=dict)


def advise(sizes: ModelSizes, training: Training, machines: Machines) -> Advice:
    """The plainest that fits: a whole copy per device, then sharding as far as it is needed, then less speed."""
    room = machines.memory * (1 - FOR_ACTIVATIONS)
    per_node = machines.devices // machines.nodes
    table = {
        name: state_bytes(sizes, training, name, per_node if name == "HYBRID_SHARD" else machines.devices)
        for name in _candidates(machines)
    }
    fits = [name for name, state in table.items() if state.total <= room]
    chosen, reasons = _choose(table, fits, machines, sizes, room)
    return Advice(chosen, reasons, _lines(chosen, fits, machines), table)


def _candidates(machines: Machines) -> list[str]:
    """From the plainest to the one that needs least memory."""
    if machines.devices == 1:
        return ["single"]
    several = ["HYBRID_SHARD"] if 1 < machines.nodes < machines.devices else []
    return ["ddp", "zero1", "SHARD_GRAD_OP", *several, "FULL_SHARD"]


def _choose(
    table: dict[str, StateBytes], fits: list[str], machines: Machines, sizes: ModelSizes, room: float
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
        return _nothing_fits(table, machines, sizes, room, reasons)
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
    table: dict[str, StateBytes], machines: Machines, sizes: ModelSizes, room: float, reasons: list[str]
) -> tuple[str, list[str]]:
    least = next(reversed(table))
    state = table[least]
    if state.gathered > room:
        reasons.append(
            f"One block alone is {gib(state.gathered / 2)} when gathered: it must be split itself, by strategy tensor within a "
            "machine."
        )
        return "tensor", reasons
    needed = -(-int(state.total - state.gathered) * machines.devices // max(1, int(room - state.gathered)))
    reasons.append(
        f"Fully sharded over {machines.devices} device(s) it is still {gib(state.total)} each: it needs about {needed} such "
        "devices, or fsdp with cpu_offload, which keeps the state in host memory and is slow."
    )
    return "cpu_offload", reasons


def _lines(chosen: str, fits: list[str], machines: Machines) -> list[str]:
    if chosen in ("single", "ddp", "zero1"):
        return [f"strategy: {chosen}"]
    if chosen == "tensor":
        return ["strategy: tensor", f"tensor: {{size: {min(8, machines.devices // machines.nodes)}}}"]
    if chosen == "cpu_offload":
        return ["strategy: fsdp", "fsdp: {cpu_offload: true, activation_checkpointing: true}"]
    extra = ", activation_checkpointing: true" if fits == ["FULL_SHARD"] else ""
    return ["strategy: fsdp", f"fsdp: {{sharding_strategy: {chosen}{extra}}}"]
