"""Out of memory: what filled it, and what to do about it, in order, with what each step is estimated to save."""

from __future__ import annotations

import contextlib
import re
import resource
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from shardwise.checkpoint.state import local_part
from shardwise.config import Batching
from shardwise.engine.batch_plan import BatchPlan
from shardwise.engine.host_memory import host_memory
from shardwise.engine.parts import Parts
from shardwise.errors import OutOfMemory, ShardwiseError
from shardwise.parallel import Strategy
from shardwise.parallel.memory import ModelSizes, Remedy, Shortage, gib

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

    strategy: Strategy
    ranks: int
    batching: Batching
    sizes: ModelSizes | None = None
    blocks: int = 0


@contextmanager
def memory_explained(doing: str, plan: BatchPlan, parts: Callable[[], Parts | None]) -> Iterator[None]:
    """Says what filled the memory when it runs out in here. `doing`: where the run is, in a few words."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not ran_out(error):
            raise
        # The traceback still holds the activations: what is allocated now is what filled the memory.
        raise OutOfMemory(_told(doing, plan, parts(), error)) from error


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
    training, batching = situation.strategy.training, situation.batching
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
    how = situation.strategy.recomputes_with
    if situation.blocks > 1 and how is not None:
        yield Remedy(f"{how} (about a third slower)", activations * RECOMPUTED * (1 - 1 / situation.blocks))
    if training.precision == "32-true":
        yield Remedy("training.precision: bf16-mixed (changes the numbers)", activations * NARROWED)


def _for_state(held: Held, situation: Situation) -> Iterator[Remedy]:
    if situation.sizes is not None:
        yield from situation.strategy.lighter(Shortage(situation.sizes, situation.ranks, held.missing, held.state))


def _for_fragments(held: Held) -> Iterator[Remedy]:
    reserved = held.state + held.activations + held.fragments
    if held.fragments > MANY_FRAGMENTS * reserved:
        yield Remedy("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment", held.fragments)


def _told(doing: str, plan: BatchPlan, parts: Parts | None, error: BaseException) -> str:
    world = plan.layout.world
    rank = f", rank {world.rank}" if world.size > 1 else ""
    said = explain(measure(world.device, parts, error), _situation(plan, parts), f"{doing}{rank}")
    return f"{said}\n  PyTorch said: {str(error).splitlines()[0] if str(error) else type(error).__name__}"


def _situation(plan: BatchPlan, parts: Parts | None) -> Situation:
    sizes, blocks = None, 0
    with contextlib.suppress(Exception):  # a task may not know its model as it is spread now: then some remedies lack
        if parts is not None:
            found = parts.task.blocks(parts.strategy.whole)
            sizes, blocks = ModelSizes.of(parts.strategy.whole, found), len(found)
    return Situation(plan.strategy, plan.layout.world.size, plan.batching, sizes, blocks)


def measure(device: torch.device, parts: Parts | None, error: BaseException) -> Held:
    """PyTorch's message knows how things stood when it was thrown; what it does not say is asked now."""
    text = str(error)
    weights, gradients, optimizer = _state(parts, device) if parts is not None else (0.0, 0.0, 0.0)
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


def _state(parts: Parts, device: torch.device) -> tuple[float, float, float]:
    """Bytes of weights, gradients and optimizer state of this rank, on this device."""
    strategy = parts.strategy
    copies = strategy.low_precision.copies if strategy.low_precision is not None else []
    weights = [*strategy.module.parameters(), *strategy.module.buffers(), *copies]
    grads = [each.grad for each in (*strategy.module.parameters(), *copies) if each.grad is not None]
    moments = [
        value
        for state in local_part(parts.optimizer).state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    return _bytes(weights, device), _bytes(grads, device), _bytes(moments, device)


def _bytes(tensors: Iterable[torch.Tensor], device: torch.device) -> float:
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return float(sum(each.numel() * each.element_size() for each in local if each.device.type == device.type))


_UNITS = {"bytes": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def _size_in(text: str, pattern: str) -> float | None:
    match = re.search(pattern, text)
    return float(match[1]) * _UNITS.get(match[2], 1) if match else None
