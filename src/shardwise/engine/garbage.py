"""Python's garbage collection, kept short: in a process with many objects a collection takes tenths of a second, at a moment
of its own choosing, and every other rank waits meanwhile. What is there when training begins stays anyway, and need not be
looked at."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_frozen() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
