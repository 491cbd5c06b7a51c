"""Importing PyTorch takes seconds, more on a machine that has just been started: a terminal is told so when it begins."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)


@contextmanager
def telling_of_imports(*, quiet: bool = False) -> Iterator[None]:
    """Nothing is said where PyTorch is not imported, and nothing by the ranks that torchrun or srun started."""
    if quiet or "RANK" in os.environ or "torch" in sys.modules or not sys.stderr.isatty():
        yield
        return
    finder = _Torch()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Torch:
    """Finds nothing; it hears what is looked for."""

    told = False

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "torch" and not self.told:
            self.told = True
            log.info("loading PyTorch …")
