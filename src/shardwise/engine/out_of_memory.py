"""Out of memory: what filled it, and what to do about it, in order, with what each step is estimated to save."""

from __future__ import annotations

import contextlib
import functools
import re
import resource
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

import torch
from torch.distributed.tensor import DTensor

from shardwise.checkpoint.state import local_part
from shardwise.config import Batching, Training
from shardwise.errors import OutOfMemory, ShardwiseError
from shardwise.parallel.memory import ModelSizes, gib, state_bytes

if TYPE_CHECKING:
    from shardwise.engine.session import Session

P = ParamSpec("P")
R = TypeVar("R")

RECOMPUTED = 0.9
"""The share of a block's activations that recomputing it does away with: its input stays."""
NARROWED = 0.4
"""The share of activations that bf16 saves: half of most, nothing of those that norms and losses keep in fp32."""
MANY_FRAGMENTS = 0.1
"""As a share of what PyTorch has reserved."""


@dataclass(frozen=True)
class Held:
    """Bytes on one rank's device when it ran out."""

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    """And other: what is allocated, and is none of these three."""
    fragments: float = 0.0
    """Reserved by PyTorch, and in pieces too small for what was asked."""
    asked: float = 0.0
    free: float = 0.0
    capacity: float = 0.0

    @property
    def state(self) -> float:
        return self.weights + self.gradients + self.optimizer

    @property
    def missing(self) -> float:
        return max(0.0, self.asked - self.free)


@dataclass(frozen=True)
class Situation:
    """What the remedies depend on."""

    training: Training
    strategy: str
    ranks: int
    batching: Batching
    sizes: ModelSizes | None = None
    blocks: int = 0


@dataclass(frozen=True)
class Remedy:
    what: str
    saves: float
    """Bytes on this rank, estimated."""


def memory_explained(
    doing: Callable[[Session], str],
) -> Callable[[Callable[Concatenate[Session, P], R]], Callable[Concatenate[Session, P], R]]:
    """A verb of Session that says what filled the memory when it runs out. `doing`: where the run is, in a few words."""

    def around(verb: Callable[Concatenate[Session, P], R]) -> Callable[Concatenate[Session, P], R]:
        @functools.wraps(verb)
        def explained(session: Session, /, *args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return verb(session, *args, **kwargs)
            except (RuntimeError, MemoryError) as error:
                if not ran_out(error):
                    raise
                # The traceback still holds the activations: what is allocated now is what filled the memory.
                raise OutOfMemory(_told(session, doing(session), error)) from error

        return explained

    return around


def ran_out(error: BaseException) -> bool:
    """Whether an error says that memory ran out: of the device, of a library on it, or of the host."""
    if isinstance(error, ShardwiseError):
        return False
    marks = ("out of memory", "not enough memory", "can't allocate memory", "ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(mark in str(error) for mark in marks)


def explain(held: Held, situation: Situation, where: str) -> str:
    """Three parts: what happened, what filled the memory, what to do."""
    asked = f"{gib(held.asked)} were asked for and {gib(held.free)} were free" if held.asked else "nothing was free"
    lines = [
        f"{where}: out of memory: {asked}, of {gib(held.capacity)}.",
        f"  held: weights {gib(held.weights)}, gradients {gib(held.gradients)}, optimizer state {gib(held.optimizer)}, "
        f"activations and other {gib(held.activations)}, fragments {gib(held.fragments)}",
    ]
    found = remedies(held, situation)
    if found:
        lines.append(f"  what to do, in this order (at least {gib(held.missing)} are missing; savings are estimates):")
        saved = 0.0
        for remedy in found:
            saved += remedy.saves
            enough = ", enough by itself" if remedy.saves >= held.missing else ""
            together = ", enough with those above" if not enough and saved >= held.missing else ""
            lines.append(f"    {remedy.what}: saves about {gib(remedy.saves)}{enough or together}")
    return "\n".join(lines)


def remedies(held: Held, situation: Situation) -> list[Remedy]:
    """From what changes no number and little speed to what is slow. Those that do not apply are left out."""
    return [
        remedy
        for remedy in (*_for_activations(held, situation), *_for_state(held, situation), *_for_fragments(held))
        if remedy.saves > 0
    ]


def _for_activations(held: Held, situation: Situation) -> Iterator[Remedy]:
    training, batching = situation.training, situation.batching
    # What was asked for is mostly activations too, and would be smaller.
    activations = held.activations + held.asked
    per_step = batching.batch_size * batching.accumulation
    smaller = next((size for size in range(batching.batch_size // 2, 0, -1) if per_step % size == 0), None)
    if smaller is not None:
        same = (
            f"training.total_batch_size stays {training.total_batch_size}"
            if training.total_batch_size is not None
            else f"training.gradient_accumulation: {per_step // smaller} keeps the numbers the same"
        )
        yield Remedy(f"training.batch_size: {smaller} ({same})", activations * (1 - smaller / batching.batch_size))
    fsdp = training.fsdp
    if situation.blocks > 1 and situation.strategy != "pipeline" and not (fsdp and fsdp.activation_checkpointing):
        how = (
            "training.fsdp.activation_checkpointing: true"
            if situation.strategy in ("fsdp", "tensor")
            else "training.strategy: fsdp with fsdp: {sharding_strategy: NO_SHARD, activation_checkpointing: true}"
        )
        yield Remedy(f"{how} (about a third slower)", activations * RECOMPUTED * (1 - 1 / situation.blocks))
    if training.precision == "32-true":
        yield Remedy("training.precision: bf16-mixed (changes the numbers)", activations * NARROWED)


def _for_state(held: Held, situation: Situation) -> Iterator[Remedy]:
    training, ranks, sizes = situation.training, situation.ranks, situation.sizes
    if sizes is None:
        return
    fsdp = training.fsdp
    whole = situation.strategy in ("single", "dp", "ddp", "zero1") or (fsdp and fsdp.sharding_strategy == "NO_SHARD")
    now = state_bytes(sizes, training, "zero1" if situation.strategy == "zero1" else "single", ranks).total
    if situation.strategy == "ddp" and ranks > 1:
        saves = now - state_bytes(sizes, training, "zero1", ranks).total
        yield Remedy(f"training.strategy: zero1 over {ranks} devices (the optimizer state is shared)", saves)
    if whole:
        counts = [ranks] if ranks > 1 else [2, 4, 8]
        saved = {count: now - state_bytes(sizes, training, "FULL_SHARD", count).total for count in counts}
        count = next((count for count in counts if saved[count] >= held.missing), counts[-1])
        yield Remedy(f"training.strategy: fsdp over {count} devices (all of the state is shared)", saved[count])
    if whole or (situation.strategy == "fsdp" and not (fsdp and fsdp.cpu_offload)):
        yield Remedy(
            "training.strategy: fsdp with fsdp: {cpu_offload: true} (the state is in host memory; slow)",
            held.state - 2 * 4 * sizes.largest_block,
        )


def _for_fragments(held: Held) -> Iterator[Remedy]:
    reserved = held.state + held.activations + held.fragments
    if held.fragments > MANY_FRAGMENTS * reserved:
        yield Remedy("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment", held.fragments)


def _told(session: Session, doing: str, error: BaseException) -> str:
    rank = f", rank {session.world.rank}" if session.world.size > 1 else ""
    said = explain(measure(session, error), _situation(session), f"{doing}{rank}")
    return f"{said}\n  PyTorch said: {str(error).splitlines()[0] if str(error) else type(error).__name__}"


def _situation(session: Session) -> Situation:
    sizes, blocks = None, 0
    with contextlib.suppress(Exception):  # a task may not know its model as it is spread now: then some remedies lack
        whole = session.parts.spread.whole
        found = session.task.blocks(whole)
        sizes, blocks = ModelSizes.of(whole, found), len(found)
    return Situation(session.config.training, session.strategy, session.world.size, session.batching, sizes, blocks)


def measure(session: Session, error: BaseException) -> Held:
    """PyTorch's message knows how things stood when it was thrown; what it does not say is asked now."""
    device, text = session.world.device, str(error)
    weights, gradients, optimizer = _state(session, device)
    if device.type == "cuda":
        free, capacity = torch.cuda.mem_get_info(device)
        allocated = _size_in(text, r"([\d.]+) (\w+) is allocated by PyTorch") or torch.cuda.memory_allocated(device)
        fragments = _size_in(text, r"([\d.]+) (\w+) is reserved by PyTorch but unallocated")
        if fragments is None:
            fragments = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free_then = _size_in(text, r"of which ([\d.]+) (\w+) is free")
        free = int(free_then if free_then is not None else free)
    else:
        free, capacity = host_memory()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        allocated, fragments = peak * (1 if sys.platform == "darwin" else 1024), 0.0
    asked = _size_in(text, r"[Tt]ried to allocate ([\d.]+) (\w+)") or 0.0
    activations = max(0.0, allocated - weights - gradients - optimizer)
    return Held(weights, gradients, optimizer, activations, fragments, asked, free, capacity)


def _state(session: Session, device: torch.device) -> tuple[float, float, float]:
    """Bytes of weights, gradients and optimizer state of this rank, on this device."""
    with contextlib.suppress(ShardwiseError):
        parts = session.parts
        copies = parts.spread.narrow.copies if parts.spread.narrow is not None else []
        weights = [*parts.spread.module.parameters(), *parts.spread.module.buffers(), *copies]
        grads = [each.grad for each in (*parts.spread.module.parameters(), *copies) if each.grad is not None]
        moments = [
            value
            for state in local_part(parts.optimizer).state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        ]
        return _bytes(weights, device), _bytes(grads, device), _bytes(moments, device)
    return 0.0, 0.0, 0.0


def _bytes(tensors: Iterable[torch.Tensor], device: torch.device) -> float:
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return float(sum(each.numel() * each.element_size() for each in local if each.device.type == device.type))


_UNITS = {"bytes": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def _size_in(text: str, pattern: str) -> float | None:
    match = re.search(pattern, text)
    return float(match[1]) * _UNITS.get(match[2], 1) if match else None


def host_memory() -> tuple[int, int]:
    """Bytes available and in all: of the machine, or of the container that this process is confined to."""
    known: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, value = line.split(":")
            known[name] = int(value.split()[0]) * 1024
    available, total = known.get("MemAvailable", 0), known.get("MemTotal", 0)
    with contextlib.suppress(OSError, ValueError):  # "max": not confined
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        if limit < total:
            available, total = min(available, max(0, limit - used)), limit
    return available, total
