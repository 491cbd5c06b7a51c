"""Compile regions: every repeated block is compiled on its own, in its place.

Blocks of one kind share their code, so that a model of forty layers compiles one, in seconds, where the whole would take
minutes. What stands around a block (sharding's hooks, recomputation) stays as it is: only its `forward` is replaced.

A block may also be recorded as a CUDA graph: the host then starts all its kernels in one call. What a graph gives, gradients
included, lies in memory that the next step writes over.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import nn

from shardwise.compat.compiler import allow_recompiles, compile_backward_early, compile_errors, compiled_frames
from shardwise.errors import one_line

MOST_SHAPES = 16
"""A block is compiled for so many kinds of input at most, then it runs as it is."""

log = logging.getLogger(__name__)


@dataclass
class Regions:
    """The compiled blocks of a model."""

    blocks: list[nn.Module] = field(default_factory=list)
    problem: str | None = None
    """Why they are not compiled after all."""
    paused: bool = False
    seconds: float = 0.0
    """Spent in calls that compiled something."""
    replays: bool = False
    """Whether they are recorded as CUDA graphs."""

    def replay(self) -> None:
        """From the next call on each is compiled anew, recorded, and then replayed."""
        self.replays = True
        allow_recompiles(2 * MOST_SHAPES)
        for block in self.blocks:
            block.__dict__["forward"].replay()

    def begin_step(self) -> None:
        """What graphs gave in the step before is not needed any more."""
        if self.replays and self.problem is None:
            torch.compiler.cudagraph_mark_step_begin()

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Within it they run as they are: what is tried out only is not worth compiling."""
        self.paused = True
        try:
            yield
        finally:
            self.paused = False

    def give_up(self, problem: BaseException) -> None:
        self.problem = f"{type(problem).__name__}: {one_line(problem)}"
        for block in self.blocks:
            block.__dict__.pop("forward", None)
        log.warning(f"the model does not compile, and runs as it is: {self.problem}")


def compile_regions(blocks: list[nn.Module], *, backend: str = "inductor", one_size: bool = False) -> Regions:
    """`one_size`: each block is compiled for the largest input it gets. Otherwise, for sizes that differ when they first do:
    blocks that share their code and differ in size, as the stages of a network do, would count as that."""
    regions = Regions()
    allow_recompiles(MOST_SHAPES)
    compile_backward_early()
    for block in blocks:
        if "forward" in block.__dict__:
            continue  # somebody has put another in its place already
        regions.blocks.append(block)
        block.__dict__["forward"] = _Region(regions, block.forward, backend, one_size)
    return regions


class _Region:
    """In the place of a block's `forward`. A copy of the block, and one that is kept in a file, has its plain one again."""

    def __init__(self, regions: Regions, plain: Callable[..., Any], backend: str, one_size: bool) -> None:
        self.regions, self.plain, self.backend = regions, plain, backend
        self.compiled = torch.compile(plain, backend=backend, dynamic=False if one_size else None)
        self.one_size, self.largest = one_size, 0

    def replay(self) -> None:
        options: dict[str, Any] | None = {"triton.cudagraphs": True} if self.backend == "inductor" else None
        self.compiled = torch.compile(self.plain, backend=self.backend, dynamic=False, options=options)

    def __reduce__(self) -> Any:
        return MethodType, (self.plain.__func__, self.plain.__self__)  # type: ignore[attr-defined]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Evaluation has other shapes, and is too short to compile for.
        if self.regions.problem is not None or self.regions.paused or not torch.is_grad_enabled():
            return self.plain(*args, **kwargs)
        if self.one_size and self._is_smaller(*args, *kwargs.values()):
            return self.plain(*args, **kwargs)
        before = compiled_frames()
        began = time.perf_counter()
        try:
            result = self.compiled(*args, **kwargs)
        except compile_errors() as error:
            self.regions.give_up(error)
            return self.plain(*args, **kwargs)
        if compiled_frames() != before:
            self.regions.seconds += time.perf_counter() - began
        return result

    def _is_smaller(self, *inputs: Any) -> bool:
        """As the last batch of an epoch may be: it is not worth compiling for."""
        size = sum(each.numel() for each in inputs if isinstance(each, torch.Tensor))
        self.largest = max(size, self.largest)
        return size < self.largest
