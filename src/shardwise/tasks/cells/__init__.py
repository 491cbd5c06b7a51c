"""`task: cells`: masked-gene pretraining of a transformer on single-cell data."""

from shardwise.errors import MissingExtra

for _package in ("anndata", "h5py", "pyarrow", "matplotlib"):
    try:
        __import__(_package)
    except ModuleNotFoundError as _error:
        if _error.name != _package:  # it is there, but something that it needs is not
            raise
        raise MissingExtra.of(_package, "cells", "task: cells") from None

from shardwise.tasks.cells.task import CellsTask  # noqa: E402

__all__ = ["CellsTask"]
