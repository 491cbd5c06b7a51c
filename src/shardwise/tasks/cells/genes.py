"""The names of a file's genes, from a column of its table `var`, and what is wrong with them."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from anndata.io import read_elem

from shardwise.errors import DataError
from shardwise.tasks.cells.opening import missing_chunks, reading
from shardwise.tasks.cells.wording import some

_NO_NAMES = {"", "nan", "NaN", "NA", "N/A", "None", "<NA>", "null"}
"""What stands where a table had nothing, after it was made text."""
_BARCODE = re.compile(r"[ACGTN]{8,}([-_.:].*)?$")
_PLACEHOLDER = 5
"""So many genes of one name, and most of those whose name is there again: it stands where there is none."""
_MOST_GENES = 70_000
"""No annotation has so many. Row numbers are smaller; of Entrez ids, which are whole numbers as well, some are larger."""


@dataclass(frozen=True)
class GeneNames:
    names: list[str]
    """By column of the matrix; empty: it has none, and is left out."""
    column: str
    """Where they are, in `var`."""
    numbers: bool
    """They are row numbers, as written where nobody has named the genes, and nobody has asked for them by data.gene_key."""
    notes: list[str] = field(default_factory=list)
    """What a person should know of them."""


_SUMMARY = re.compile(
    r"__(no_feature|ambiguous|too_low_aQual|not_aligned|alignment_not_unique)|N_(unmapped|multimapping|noFeature|ambiguous)"
    r"|(Unassigned|Assigned)(_\w+)?"
)
"""Of HTSeq, STAR and featureCounts."""


def cell_names(content: Any) -> list[str]:
    """Empty where they are numbered, as 0 or cell_0 does, and not named."""
    obs = content.get("obs", {})
    column = str(getattr(obs, "attrs", {}).get("_index", "_index"))
    names = _texts(read_elem(obs[column])) if column in obs else []
    numbered = len({re.sub(r"\d+", "", name) for name in names}) == 1
    return [] if numbered else names


def gene_names(path: Path, content: Any, table: str, key: str | None) -> GeneNames:
    var = content[table]
    column = key or str(var.attrs.get("_index", "_index"))
    if column not in var:
        held = ", ".join(name for name in var if not name.startswith("__"))
        raise DataError(f"{path}: {table} has no column {column!r}. It has: {held}. Set data.gene_key accordingly")
    texts = var[column]["categories"] if "categories" in getattr(var[column], "keys", tuple)() else var[column]
    if missing := missing_chunks(texts):
        raise DataError(f"{path}: {missing}, and the names of genes in them: the store is not whole. Copy it again")
    names = _texts(read_elem(var[column]))
    where = f"{table}[{column!r}]" if key else f"the index of {table}"
    notes = _check_missing(path, names, where, var, column)
    present = [name for name in names if name]
    if key is None and _are_barcodes(present):
        raise DataError(
            f"{path}: the names of its genes, in {where}, look like the barcodes of cells ({some(present)}). Is the matrix "
            "transposed? Write it with cells as rows: adata.T.write_h5ad(…). If they are genes, say so with "
            f"data.gene_key: {column}"
        )
    notes += _check_kinds(path, var) + _check_summaries(path, present)
    times = Counter(present)
    if len(times) < len(present):
        name, most = times.most_common(1)[0]
        if most >= _PLACEHOLDER and 2 * (most - 1) > len(present) - len(times):
            called = some([name], repr)
            place = "var_names" if key is None else f"var[{key!r}]"
            rest = (
                f", or take those genes out: adata[:, adata.{place} != {called}].write_h5ad(…)"
                if len(times) > 1
                else ""
            )
            raise DataError(
                f"{path}: {most} of its {len(names)} genes have the same name, {called}, in {where}: it seems to stand where "
                f"there is no name. Choose another column with data.gene_key{_columns_hint(var, column)}{rest}"
            )
        twice = [name for name, number in times.items() if number > 1]
        raise DataError(
            f"{path}: {len(present) - len(times)} gene names occur more than once, for example {some(twice, repr)}. Make "
            "them unique (adata.var_names_make_unique()), or choose another column with data.gene_key"
            f"{_columns_hint(var, column)}"
        )
    return GeneNames(names, column, key is None and _are_row_numbers(present), notes)


def name_columns(path: Path, table: str, besides: str) -> dict[str, list[str]]:
    """The other columns of a file's `var` that could name its genes: texts, nearly all different, no row numbers."""
    with reading(path) as content:
        return _name_columns(content[table], besides)


def _name_columns(var: Any, besides: str) -> dict[str, list[str]]:
    found = {}
    for name in var:
        if name == besides or name.startswith("__"):
            continue
        try:
            values = read_elem(var[name])
        except (KeyError, TypeError, ValueError, OSError):
            continue
        if getattr(values, "dtype", np.dtype("O")).kind in "biufcmM":
            continue
        texts = _texts(values)
        different = {text for text in texts if text}
        if len(different) > 0.5 * len(texts) and not _are_row_numbers(
            sorted(different, key=lambda text: (len(text), text))
        ):
            found[name] = texts
    return found


def _texts(values: Any) -> list[str]:
    """Without what only looks like a name."""
    import pandas

    array = np.asarray(values, dtype=object)
    missing = pandas.isna(array)
    texts = ("" if gone else _text(value).strip() for value, gone in zip(array, missing, strict=True))
    return ["" if text in _NO_NAMES else text for text in texts]


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _check_missing(path: Path, names: list[str], where: str, var: Any, column: str) -> list[str]:
    missing = [number for number, name in enumerate(names) if not name]
    if not missing:
        return []
    places = ", ".join(map(str, missing[:3])) + (", …" if len(missing) > 3 else "")
    what = f"{path}: {len(missing)} of {len(names)} genes have no name in {where} (NaN or empty: columns {places})"
    if 2 * len(missing) >= len(names):
        raise DataError(f"{what}. Choose another column with data.gene_key{_columns_hint(var, column)}")
    return [f"{what}. They are left out. Another column can be chosen with data.gene_key{_columns_hint(var, column)}"]


def _check_kinds(path: Path, var: Any) -> list[str]:
    """Cell Ranger writes antibodies and peaks beside genes, and says so in this column."""
    kinds = Counter(_texts(read_elem(var["feature_types"]))) if "feature_types" in var else Counter[str]()
    if len(kinds) < 2:
        return []
    listed = ", ".join(f"{kind or 'none'}: {number}" for kind, number in kinds.most_common(5))
    one = kinds.most_common(1)[0][0]
    return [
        f"{path}: what it calls genes is of several kinds ({listed}), and all are trained on as genes. To keep one kind: "
        f"adata[:, adata.var['feature_types'] == {one!r}].write_h5ad(…)"
    ]


def _check_summaries(path: Path, names: list[str]) -> list[str]:
    """Programs that count reads write what they could not assign below the genes."""
    if not (found := [name for name in names if _SUMMARY.fullmatch(name)]):
        return []
    return [
        f"{path}: {len(found)} of its genes count reads that belong to none ({some(found)}), and are trained on as genes. To "
        "leave them out: adata[:, [name for name in adata.var_names if name not in (…)]].write_h5ad(…)"
    ]


def _columns_hint(var: Any, column: str) -> str:
    columns = _name_columns(var, column)
    return f" ({'; '.join(f'{name}: {some(names)}' for name, names in list(columns.items())[:4])})" if columns else ""


def _are_row_numbers(names: list[str]) -> bool:
    if not names or not all(name.isascii() and name.isdigit() for name in names):
        return False
    numbers = [int(name) for name in names]
    return numbers[-1] < _MOST_GENES and all(a < b for a, b in itertools.pairwise(numbers))


def _are_barcodes(names: list[str]) -> bool:
    return len(names) > 1 and 2 * sum(bool(_BARCODE.match(name)) for name in names) > len(names)
