"""How long each block of a model takes, forward and backward, in a trial on the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


def block_times(model: nn.Module, blocks: list[nn.Module], job: Callable[[nn.Module], Tensor]) -> list[float]:
    """Seconds of each block, with what the model does before and after them counted to the first and the last."""
    marks: list[tuple[str, int, float]] = []

    def mark(kind: str, position: int) -> Callable[..., None]:
        return lambda *_: marks.append((kind, position, time.perf_counter()))

    hooks: list[Any] = []
    for position, block in enumerate(blocks):
        hooks.append(block.register_forward_pre_hook(mark("enter", position)))
        hooks.append(block.register_forward_hook(mark("leave", position)))
        hooks.append(block.register_full_backward_pre_hook(mark("enter back", position)))
        hooks.append(block.register_full_backward_hook(mark("leave back", position)))
    for _ in range(2):  # the first time includes what is done once: threads, caches
        marks.clear()
        began = time.perf_counter()
        loss = job(model)
        turned = time.perf_counter()
        loss.backward()
        ended = time.perf_counter()
    for hook in hooks:
        hook.remove()
    at = {(kind, position): moment for kind, position, moment in marks}
    last = len(blocks) - 1
    times = [
        at["leave", position] - at["enter", position] + at["leave back", position] - at["enter back", position]
        for position in range(len(blocks))
    ]
    times[0] += at["enter", 0] - began + ended - at["leave back", 0]
    times[last] += turned - at["leave", last] + at["enter back", last] - turned
    return times
