"""What the values of a file are: counts, normalised, logged. Judged cell by cell, so that a mixture is noticed.

A cell of counts has whole numbers only. Of other cells, their sum tells: values normalised to 10,000 add up to it in every
cell, and logged ones do when the log is undone, in the base they were logged in. Where genes were left out after that, the size
of the values has to do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import DataError
from shardwise.tasks.cells.rows import SparseRows

Floats = NDArray[np.float64]
Kind = Literal["counts", "ones", "logged", "linear", "unclear", "nothing"]

LARGEST_LOG, SMALLEST_LINEAR = 15.0, 50.0
"""ln(1 + 1,000,000) is 14: logged values are not above the first. A normalised cell has a value above the second."""
_SAME = 5e-3
"""Sums that differ by less are the same: values may be kept in two bytes."""
_NEAR = 0.05
"""So much may be missing of a sum, where a few genes were left out after cells had been normalised."""
_MOST, _SOME, _FEW = 0.9, 0.05, 3
_NO_CHANCE = 5
"""So many cells that add up to one total in another base than the rest do not so by chance."""
_ROUNDING, _LARGEST_ROUNDING = 2e-6, 0.02
"""Counts that were logged and taken back in fp32 are off by less, of their size and at all."""
_SHORT = 5
"""A cell with fewer genes may have whole numbers by chance."""
_UNDONE_PER_PIECE = 128
"""Cells whose log is undone, in each piece that is read: it takes longer than all the rest."""
_BASES: list[tuple[str, Any]] = [
    ("natural logarithm", np.expm1),
    ("base 2", lambda v: np.exp2(v) - 1),
    ("base 10", lambda v: np.power(10.0, v) - 1),
]


@dataclass(frozen=True)
class Scale:
    kind: Kind
    text: str
    """For a person: what the values look like."""
    total: float | None = None
    """What the values of every cell add up to, before the log if they are logged."""
    base: str | None = None
    """Of the logarithm, where it can be told."""
    doubt: str | None = None
    """What makes it unsure that all cells are of one scale."""

    @property
    def whole(self) -> bool:
        return self.kind in ("counts", "ones")


class Tally:
    """What is known of the cells of one file, piece by piece."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.looked_at = 0
        self._parts: list[dict[str, NDArray[Any]]] = []

    def add(self, rows: SparseRows, first: int) -> None:
        """Cells as they stand in the file, the first of them with this number."""
        self.looked_at += len(rows)
        filled = np.flatnonzero(rows.lengths)
        if not len(filled):
            return
        starts = rows.starts[filled]  # between two of these lies nothing: the cells left out are empty
        values = rows.values[rows.starts[0] : rows.starts[-1]].astype(np.float64)
        starts = starts - rows.starts[0]
        off = np.abs(values - np.rint(values))
        undone = np.full((len(_BASES), len(filled)), np.nan)
        step = -(-len(filled) // _UNDONE_PER_PIECE) | 1  # odd: cells of two kinds may take turns
        part = rows.take(filled[::step])
        small = np.minimum(part.values.astype(np.float64), 80)
        for base, (_, undo) in enumerate(_BASES):
            undone[base, ::step] = np.add.reduceat(undo(small), part.starts[:-1])
        self._parts.append(
            {
                "cell": first + filled,
                "genes": rows.lengths[filled],
                "whole": ~np.logical_or.reduceat(off > np.minimum(_ROUNDING * values, _LARGEST_ROUNDING), starts),
                "smallest": np.minimum.reduceat(values, starts),
                "largest": np.maximum.reduceat(values, starts),
                "sum": np.add.reduceat(values, starts),
                **{f"undone {base}": row for base, row in enumerate(undone)},
            }
        )

    @property
    def empty(self) -> int:
        """Cells without any value, of those looked at."""
        return self.looked_at - sum(len(part["cell"]) for part in self._parts)

    def scale(self) -> Scale:
        """Of all cells looked at. A DataError names two of them where they are of different scales."""
        if not self._parts:
            return Scale("nothing", "nothing but zeros")
        return _judged(
            self.path, {name: np.concatenate([part[name] for part in self._parts]) for name in self._parts[0]}
        )


def check_alike(paths: Sequence[Path], scales: Sequence[Scale]) -> list[str]:
    """Files of one training: of different scales is an error; what a person should know of them is returned."""
    seen = [(path, scale) for path, scale in zip(paths, scales, strict=True) if scale.kind != "nothing"]
    families = {"counts": "whole", "ones": "whole", "logged": "logged", "linear": "linear"}
    listed = _listed([(path, scale.text, (scale.kind, scale.base, f"{scale.total or 0:.2g}")) for path, scale in seen])
    if (
        len({scale.whole for _, scale in seen}) > 1
        or len({families.get(scale.kind) for _, scale in seen} - {None}) > 1
        or len({scale.base for _, scale in seen} - {None}) > 1
    ):
        raise DataError(
            "data.paths names files of different scales, which cannot be trained on together:\n  "
            + "\n  ".join(listed)
            + "\nUse a layer that is the same in all of them (data.layer), or bring them to one scale"
        )
    notes = []
    untold = {scale.total is None for _, scale in seen if not scale.whole}
    if len({scale.kind for _, scale in seen}) > 1 or len(untold) > 1:
        why = (
            " Where cells add up to no one total, genes were left out, or values changed in another way."
            if len(untold) > 1
            else ""
        )
        notes.append(
            f"the files may be of different scales: {'; '.join(listed)}.{why} Use a layer that is the same in all (data.layer)"
        )
    totals = [(path, scale.total) for path, scale in seen if scale.total is not None]
    if totals and max(t for _, t in totals) > 1.05 * min(t for _, t in totals):
        sums = "; ".join(_listed([(path, f"{total:.6g}", f"{total:.2g}") for path, total in totals]))
        notes.append(
            f"the files were normalised to different sums per cell ({sums}): the same expression is another number in each, "
            "which matters for tokenizer.strategy: continuous_projection. Normalise all to one sum"
        )
    return notes


def _listed(seen: Sequence[tuple[Path, str, Hashable]], of_each: int = 3) -> list[str]:
    """Files and what is said of them, in their order; of those that are alike, by the last of the three, a few and how many."""
    alike = Counter(kind for _, _, kind in seen)
    told: Counter[Hashable] = Counter()
    lines = []
    for path, text, kind in seen:
        told[kind] += 1
        if told[kind] <= of_each:
            more = alike[kind] - of_each if told[kind] == of_each else 0
            lines.append(f"{path}: {text}" + (f" (and {more} more like it)" if more > 0 else ""))
    return lines


def _judged(path: Path, cells: dict[str, NDArray[Any]]) -> Scale:
    whole, largest = cells["whole"], cells["largest"]
    if whole.all():
        if np.rint(largest.max()) == 1:
            return Scale("ones", "ones only (whether a gene is expressed, not how much)")
        return Scale("counts", f"whole numbers (counts), the largest {largest.max():.6g}")
    broken = ~whole
    may_be_logged = broken & (largest <= SMALLEST_LINEAR)
    if may_be_logged.sum() >= _MOST * broken.sum():
        undone = may_be_logged & ~np.isnan(cells["undone 0"])
        groups = _groups(cells, undone)
        _check_one_base(path, groups, undone, cells["cell"])
        common = groups[0] if groups and groups[0].members.sum() >= _MOST * undone.sum() else None
        if common and common.base is not None:
            name, sums = _BASES[common.base][0], f"before the log each cell adds up to {common.total:.6g}"
            _check_one_scale(path, cells, "logged values", may_be_logged)
            return Scale("logged", f"logged values ({name}): {sums}", common.total, name)
        for base, (name, _) in enumerate(_BASES if common is None else ()):
            if _whole_sums(cells[f"undone {base}"][undone]):
                # log2(1 + 1) and log2(1 + 3) are whole numbers as well.
                by_chance = (largest <= LARGEST_LOG) & (base > 0)
                _check_one_scale(path, cells, "logged counts", may_be_logged | by_chance)
                text = f"logged counts ({name}), which were not normalised before, the largest {largest.max():.6g}"
                return Scale("logged", text, base=name)
    total = _constant(cells["sum"][broken])
    if total is not None:
        same = np.abs(cells["sum"] - total) <= _NEAR * total
        rest = ~same & broken
        small = rest & (largest <= LARGEST_LOG)
        foreign = small if _logs_of_one_total(cells, small) else np.zeros_like(small)
        # Whole numbers that add up to the same as the others are normalised, too: 2,000 counts scaled to 10,000 are.
        _check_one_scale(path, cells, "normalised values", same | (rest & ~foreign))
        return Scale("linear", f"normalised values, not logged: each cell adds up to {total:.6g}", total)
    return _judged_by_size(path, cells)


def _judged_by_size(path: Path, cells: dict[str, NDArray[Any]]) -> Scale:
    """No sum is the same in all cells: those with whole numbers may have them by chance, if they are few."""
    whole, largest = cells["whole"], cells["largest"]
    broken = ~whole
    long = cells["genes"] >= _SHORT
    few_broken = broken.sum() < _SOME * len(broken)
    # Counts begin with 1. Scaled ones may be whole too, 50 counts scaled to 10,000 for example, and are multiples of the scale.
    counts = whole & long & (np.rint(cells["smallest"]) == 1)
    many_whole = counts.sum() >= max(_FEW, _SOME * long.sum())
    small, large = broken & (largest <= LARGEST_LOG), broken & (largest > SMALLEST_LINEAR)
    if few_broken or many_whole:
        _check_one_scale(path, cells, "values that are not whole (normalised or logged)", broken, sure=counts)
    if min(small.sum(), large.sum()) >= _FEW and (
        _logs_of_one_total(cells, small) or _constant(cells["sum"][large]) is not None
    ):
        clear = {name: column[small | large] for name, column in cells.items()}
        _check_one_scale(path, clear, "logged values", clear["largest"] <= LARGEST_LOG)
    top = float(largest[broken].max())
    if min(small.sum(), large.sum()) >= max(_FEW, _SOME * broken.sum()):
        one, other = (int(cells["cell"][which][0]) for which in (small, large))
        doubt = (
            f"some cells look logged, such as cell {one}, and others do not, such as cell {other}: were files of different "
            "scales joined?"
        )
        return Scale("linear", f"values that are neither whole nor logged, the largest {top:.6g}", doubt=doubt)
    if top > SMALLEST_LINEAR:
        return Scale("linear", f"values that are neither whole nor logged, the largest {top:.6g}")
    if 1 < top <= LARGEST_LOG:
        return Scale("logged", f"values that look logged, the largest {top:.6g}")
    return Scale("unclear", f"values that are not whole, the largest {top:.6g}: logged or not cannot be told")


@dataclass(frozen=True)
class _Group:
    """Cells that add up to one total when the log is undone in this base, or, None, as they are."""

    base: int | None
    total: float
    members: NDArray[np.bool_]
    spread: float


def _groups(cells: dict[str, NDArray[Any]], which: NDArray[np.bool_]) -> list[_Group]:
    """These cells by base and total, the most common first; not those of a total that only few have."""
    groups: list[_Group] = []
    rest = which.copy()
    while rest.sum() >= _FEW and len(groups) <= len(_BASES):
        own = groups[0].base if groups else 0  # of readings that fit alike, as for cells that are all the same
        found = [_largest_group(base, cells[f"undone {base}"], rest) for base in range(len(_BASES))]
        found.append(_largest_group(None, cells["sum"], rest))
        most = max(group.members.sum() for group in found)
        if most < _FEW:
            break
        # Of small values any base gives nearly the same sum in all cells: the right one gives the same.
        best = min(
            (group for group in found if group.members.sum() >= _MOST * most),
            key=lambda group: (max(group.spread, 1e-6), group.base != own),
        )
        groups.append(best)
        rest &= ~best.members
    return groups


def _largest_group(base: int | None, sums: Floats, which: NDArray[np.bool_]) -> _Group:
    places = np.flatnonzero(which)
    places = places[np.argsort(sums[places])]
    ordered = sums[places]
    ends = np.searchsorted(ordered, ordered * (1 + 2 * _SAME), side="right")
    first = int((ends - np.arange(len(ordered))).argmax())
    members = np.zeros_like(which)
    members[places[first : ends[first]]] = True
    total = float(np.median(sums[members]))
    return _Group(base, total, members, float(np.abs(sums[members] / total - 1).mean()))


def _check_one_base(path: Path, groups: list[_Group], which: NDArray[np.bool_], numbers: NDArray[Any]) -> None:
    """Groups explain nearly all cells, the common one's apart from the others': those of another base are no chance."""
    if not groups:
        return
    others = which & ~groups[0].members
    explained = np.logical_or.reduce([group.members for group in groups]) & others
    if others.sum() < _NO_CHANCE or explained.sum() < _MOST * others.sum():
        return
    bases = {group.base: group.members for group in reversed(groups)}
    if len(bases) > 1:
        listed = ", ".join(
            f"{members.sum()} hold {'values that are not logged' if base is None else f'logged values ({_BASES[base][0]})'}, "
            f"such as cell {numbers[members][0]}"
            for base, members in reversed(bases.items())
        )
        raise DataError(
            f"{path}: its cells are of different scales: of {which.sum()} looked at closely, {listed}. They cannot be "
            "trained on together. Use a layer in which all cells are alike (data.layer), or bring them to one scale"
        )


def _logs_of_one_total(cells: dict[str, NDArray[Any]], which: NDArray[np.bool_]) -> bool:
    columns = (cells[f"undone {base}"][which] for base in range(len(_BASES)))
    return any(_constant(undone[~np.isnan(undone)]) is not None for undone in columns)


def _constant(sums: Floats) -> float | None:
    """What nearly all of these sums are."""
    if len(sums) < _FEW:
        return None
    middle = float(np.median(sums))
    return middle if (np.abs(sums - middle) <= _SAME * middle).mean() >= _MOST else None


def _whole_sums(sums: Floats) -> bool:
    near = (np.abs(sums - np.rint(sums)) < 0.02) & (sums < 20_000)  # of larger ones fp32 does not keep enough
    return len(sums) >= _FEW and bool(near.mean() >= _MOST)


def _check_one_scale(
    path: Path,
    cells: dict[str, NDArray[Any]],
    what: str,
    fitting: NDArray[np.bool_],
    *,
    sure: NDArray[np.bool_] | None = None,
) -> None:
    """All cells are `fitting`, or it is told which are not; those that are `sure` not to are the better example."""
    other = ~fitting
    if not other.any():
        return
    example = other & sure if sure is not None and (other & sure).any() else other
    names = "whole numbers (counts)" if cells["whole"][other].all() else "values that are not logged"
    first, second = int(cells["cell"][fitting][0]), int(cells["cell"][example][0])
    raise DataError(
        f"{path}: its cells are of different scales: {fitting.sum()} of the {len(other)} looked at hold {what}, such as cell "
        f"{first}, and {other.sum()} hold {names}, such as cell {second}. They cannot be trained on together. Use a layer in "
        "which all cells are alike (data.layer), or bring them to one scale"
    )
