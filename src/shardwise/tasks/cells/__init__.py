"""`task: cells`: masked-gene pretraining of a transformer on single-cell data."""

from importlib.util import find_spec

from shardwise.errors import MissingExtra

# Looked for and not imported: matplotlib takes tenths of a second, and is for a picture at the end.
if _missing := [name for name in ("anndata", "h5py", "pyarrow", "matplotlib") if find_spec(name) is None]:
    raise MissingExtra.of(_missing[0], "cells", "task: cells")

from shardwise.tasks.cells.task import CellsTask

__all__ = ["CellsTask"]
