"""Cells made from a seed: types that differ in a few programs of genes, counts as noisy as real ones."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from shardwise.config.seeds import Purpose
from shardwise.data.cache import cache_folder, made_once
from shardwise.tasks.cells.config import CellsData


def synthetic_file(options: CellsData, seed: int) -> Path:
    """The h5ad file with these cells; made where it is not there yet."""
    name = f"cells-{options.num_cells}x{options.num_genes}-{options.num_types}types-seed{seed}.h5ad"
    return made_once(cache_folder() / "synthetic" / name, lambda path: _write(path, options, seed))


def _write(path: Path, options: CellsData, seed: int) -> None:
    import anndata
    import pandas as pd
    from scipy import sparse

    counts, types = synthetic_counts(options.num_cells, options.num_genes, options.num_types, seed)

    # As objects: anndata 0.12 cannot write the strings of pandas 3.
    def names(kind: str, number: int) -> pd.Index:
        return pd.Index([f"{kind}{index}" for index in range(number)], dtype=object)

    obs = pd.DataFrame(index=names("cell", options.num_cells))
    obs["cell_type"] = pd.Categorical.from_codes(types, categories=names("type", options.num_types))
    var = pd.DataFrame(index=names("gene", options.num_genes))
    data = anndata.AnnData(sparse.csr_matrix(counts.astype(np.float32)), obs=obs, var=var)
    data.uns["shardwise"] = json.dumps({"seed": seed, "made": "synthetic counts, negative binomial"})
    data.write_h5ad(path)


def synthetic_counts(
    cells: int, genes: int, types: int, seed: int
) -> tuple[np.ndarray[tuple[int, int], np.dtype[np.int64]], np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """Counts of the negative binomial distribution, whose variance exceeds the mean, and the type of each cell.

    Genes work in programs: those of one program rise and fall together from cell to cell. A type is a choice of
    programs that are on; how strongly, differs between its cells.
    """
    rng = np.random.default_rng([seed, Purpose.DATA])
    programs = max(4, 2 * types)
    member = rng.integers(0, programs, size=genes)
    base = rng.lognormal(-0.5, 0.8, size=genes)
    on = rng.permuted(np.tile(np.arange(programs) < max(2, programs // 4), (types, 1)), axis=1)
    kind = rng.integers(0, types, size=cells)
    activity = on[kind] * rng.gamma(3.0, 0.6, size=(cells, programs))
    depth = rng.lognormal(0.0, 0.4, size=(cells, 1))
    mean = depth * base * (0.15 + activity[:, member])
    dispersion = 0.7
    counts = rng.poisson(rng.gamma(1 / dispersion, dispersion * mean))
    return counts, kind
