"""h5ad files for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anndata
import numpy as np
import pandas as pd
from scipy import sparse


def write_cells(
    path: Path,
    counts: Any,
    genes: list[str] | None = None,
    labels: list[str] | None = None,
    *,
    dense: bool = False,
    **more: Any,
) -> Path:
    counts = np.asarray(counts, np.float32)
    obs = pd.DataFrame(index=pd.Index([f"cell{i}" for i in range(len(counts))], dtype=object))
    if labels is not None:
        obs["cell_type"] = pd.Categorical(pd.Series(labels, dtype=object, index=obs.index))
    names = genes or [f"gene{i}" for i in range(counts.shape[1])]
    var = pd.DataFrame(index=pd.Index(names, dtype=object))
    data = anndata.AnnData(counts if dense else sparse.csr_matrix(counts), obs=obs, var=var)
    for name, value in more.items():
        setattr(data, name, value)
    data.write_h5ad(path)
    return path


def random_counts(cells: int, genes: int, seed: int = 0, density: float = 0.3) -> Any:
    """Each cell expresses some genes; the first two values of a cell tell which it is."""
    rng = np.random.default_rng(seed)
    return rng.integers(1, 30, (cells, genes)) * (rng.random((cells, genes)) < density)
