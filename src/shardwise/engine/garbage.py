"""Python's garbage collection, held off the steps: it takes tenths of a second in a process with many objects, at a moment of its
own choosing, and every other rank waits meanwhile."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EVERY = 100
"""Steps between two collections, at which all ranks collect together."""


@contextmanager
def garbage_held_off() -> Iterator[Callable[[int], None]]:
    """What it gives is called after every step, with its number. The oldest objects, which are many and stay, are left alone."""
    was_on = gc.isenabled()
    gc.disable()

    def stepped(step: int) -> None:
        if step % EVERY == 0:
            gc.collect(1)

    try:
        yield stepped
    finally:
        if was_on:
            gc.enable()
