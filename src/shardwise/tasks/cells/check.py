"""The cells are read once before anything is trained: what is wrong with them is an error, what is odd is told."""

from __future__ import annotations

import itertools
import logging
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import DataError
from shardwise.tasks.cells.config import CellsData
from shardwise.tasks.cells.genes import cell_names
from shardwise.tasks.cells.h5ad import DEFAULT_LABEL, H5adFiles
from shardwise.tasks.cells.opening import reading
from shardwise.tasks.cells.rows import CellSource, SparseRows
from shardwise.tasks.cells.scale import Scale, Tally, check_alike
from shardwise.tasks.cells.wording import for_all_files, shape_of

PIECE, MOST_PIECES = 1024, 1024
"""A million cells are read in full; of more, as many pieces spread evenly, and some of every file."""
FEWEST_OF_A_FILE = 4
TELLING = 10
"""Two cells that agree in so many genes and all their values are the same cell."""

MOST_FILES = 50
"""Whose cells are compared by their names."""
BY_CHANCE = 0.2
"""The share of cells that may have the name of a cell in another file. Of a million barcodes, two samples share far fewer."""
MOST_LABELS = 20
"""Of fewer, a few cells may each have their own."""

log = logging.getLogger(__name__)


def scales_of(source: H5adFiles) -> list[Scale]:
    """What the values of each file are, by a few cells from all over it: quick enough for every process to ask."""
    blocks = min(16, max(4, 512 // len(source.files)))
    return _scales(source, _pieces(source.bounds.tolist(), 32, blocks * len(source.files), blocks))


def check_cells(source: CellSource, options: CellsData, *, twins: bool) -> str | None:
    """Read all cells, or, of a huge corpus, pieces spread evenly over it. Returns what their values look like.

    `twins`: cells that are there twice are told. Not where all are compared with those held out (see overlap.py).
    """
    files = source if isinstance(source, H5adFiles) else None
    look = _Look(len(files.files) if files else 1, twins)
    with ExitStack() as stack:
        tallies = stack.enter_context(files.tallied()) if files else []
        bounds: list[int] = files.bounds.tolist() if files else [0, len(source)]
        began = said = time.monotonic()
        for number, first, last in _pieces(bounds, PIECE, MOST_PIECES, FEWEST_OF_A_FILE):
            look.add(number, source.read(first, last))
            if time.monotonic() - said > 10:
                said = time.monotonic()
                log.info(f"checking the cells: {last / len(source):.0%} after {said - began:.0f} s")
    look.tell(tallies, "the sharded copy" if files is None else "")
    if files is None:
        return None
    _warn_of_shared_names(files)
    scales = [tally.scale() for tally in tallies]
    notes = check_alike([tally.path for tally in tallies], scales)
    for note in notes:
        log.warning(note)
    told: defaultdict[str, list[tuple[Path, str]]] = defaultdict(list)
    for tally, scale in zip(tallies, scales, strict=True):
        for what in (scale.doubt, _against_normalize(scale, options)):
            if what:
                told[shape_of(what, tally.path)].append((tally.path, f"{tally.path}: {what}"))
    for alike in told.values():
        for text in for_all_files(alike):
            log.warning(text)
    if notes:
        return "values that are not alike in all files"
    return next((scale.text for scale in scales if scale.kind != "nothing"), None)


def _warn_of_shared_names(files: H5adFiles) -> None:
    """Cells of one name in two files may be one cell, counted twice. Of two samples, some have a barcode in common by chance."""
    if not 1 < len(files.files) <= MOST_FILES:
        return
    named: list[tuple[Path, set[str]]] = []
    for file in files.files:
        with reading(file.path) as content:
            named.append((file.path, set(cell_names(content))))
    for one, other in itertools.combinations(named, 2):
        (path, names), (larger, more) = sorted((one, other), key=lambda each: len(each[1]))
        shared = len(names & more)
        if shared > BY_CHANCE * len(names):
            log.warning(
                f"{shared} of the {len(names)} cells of {path} have the name of a cell of {larger}. If they are the same cells, "
                "counted or processed twice, they are trained on and held out at once: leave one of the files out"
            )
            return


def check_held_out(rows: SparseRows, labels: Sequence[str], cells: int, options: CellsData) -> None:
    if len(labels) > max(MOST_LABELS, cells // 2):
        log.warning(
            f"data.label_key: {options.label_key or DEFAULT_LABEL} has {len(labels)} different values for {cells} cells: "
            "neighbours hardly share one, and knn_agreement says nothing. Choose a column with groups of cells"
        )
    if not rows.lengths.any():
        raise DataError(
            f"none of the {len(rows)} cells held out of {', '.join(options.paths[:3])} has any gene: there is nothing to "
            "validate on. Take cells without genes out of the data, or hold more out: data.valid_fraction"
        )


def _scales(source: H5adFiles, pieces: Iterator[tuple[int, int, int]]) -> list[Scale]:
    with source.tallied() as tallies:
        for _, first, last in pieces:
            source.read(first, last)
    scales = [tally.scale() for tally in tallies]
    check_alike([tally.path for tally in tallies], scales)
    return scales


def _pieces(bounds: Sequence[int], piece: int, at_most: int, of_a_file: int) -> Iterator[tuple[int, int, int]]:
    """File and range of rows: everything, or spread evenly over each file, its first and its last cells among them."""
    share = min(1.0, at_most * piece / max(1, bounds[-1]))
    for number, (begin, end) in enumerate(itertools.pairwise(bounds)):
        starts = np.arange(begin, end, piece)
        wanted = max(of_a_file, round(share * len(starts)))
        if wanted < len(starts):
            starts = starts[np.linspace(0, len(starts) - 1, wanted).astype(int)]
        for start in starts.tolist():
            yield number, start, min(start + piece, end)


def _against_normalize(scale: Scale, options: CellsData) -> str | None:
    if scale.kind == "nothing":
        return "none of the cells looked at has a value other than zero"
    if scale.kind == "ones":
        return (
            f"it holds {scale.text}: all genes of a cell rank alike, and there is no expression to predict. Is there a layer "
            "with counts (data.layer)?"
        )
    if options.normalize == "log1p" and scale.kind == "logged":
        return f"it holds {scale.text}, and data.normalize: log1p would log them again. Set data.normalize: none, or leave it out"
    if options.normalize == "auto" and scale.kind == "linear":
        return (
            f"it holds {scale.text}. They are taken as they are. data.normalize: log1p scales and logs them; data.normalize: "
            "none says that they are meant so"
        )
    if options.normalize == "auto" and scale.kind == "unclear":
        return (
            f"it holds {scale.text}. They are taken as they are. Say with data.normalize whether to scale and log them"
        )
    return None


class _Look:
    """What is seen of the cells as they are trained on: those without genes, and those that are there twice."""

    def __init__(self, files: int, twins: bool) -> None:
        self._twins = twins
        self.cells, self.empty = np.zeros(files, np.int64), np.zeros(files, np.int64)
        self._prints: list[NDArray[np.uint64]] = []
        self._files: list[int] = []

    def add(self, number: int, rows: SparseRows) -> None:
        lengths = rows.lengths
        self.cells[number] += len(rows)
        self.empty[number] += int((lengths == 0).sum())
        if self._twins and (lengths >= TELLING).any():
            filled = np.flatnonzero(lengths)
            prints = np.add.reduceat(_bits(rows), rows.starts[filled])
            self._files.append(number)
            self._prints.append(prints[lengths[filled] >= TELLING])

    def tell(self, tallies: Sequence[Tally], where: str) -> None:
        self._tell_empty(tallies, where)
        self._tell_twins(tallies, where)

    def _tell_empty(self, tallies: Sequence[Tally], where: str) -> None:
        cells, empty = int(self.cells.sum()), int(self.empty.sum())
        zeros = sum(tally.empty for tally in tallies)  # a sharded copy has kept the genes of the vocabulary only
        kinds = [f"{zeros} are all zeros"] if zeros else []
        if empty > zeros:
            kinds.append(f"{empty - zeros} express no gene of the vocabulary")
        worst = int(self.empty.argmax())
        place = str(tallies[worst].path) if tallies else where
        among = f", most of them in {place}" if len(tallies) > 1 else f" in {place}"
        if empty == cells:
            raise DataError(
                f"none of the {cells} cells looked at{among} has any gene ({' and '.join(kinds)}): there is nothing to train "
                "on. Check data.layer, data.gene_key and data.gene_vocab"
            )
        if empty:
            log.warning(
                f"{empty} of the {cells} cells looked at have no gene{among}: {' and '.join(kinds)}. They are kept, and count "
                "nothing in the loss"
            )

    def _tell_twins(self, tallies: Sequence[Tally], where: str) -> None:
        if not self._prints:
            return
        prints = np.concatenate(self._prints)
        files = np.repeat(self._files, [len(part) for part in self._prints])
        _, which, times = np.unique(prints, return_inverse=True, return_counts=True)
        twins = times[which] > 1
        if twins.sum() <= max(1, 0.01 * len(prints)):
            return
        of_file = np.bincount(files[twins], minlength=len(self.cells))
        paths = [str(tallies[number].path) for number in np.flatnonzero(of_file).tolist()] if tallies else [where]
        log.warning(
            f"{twins.sum()} of the {len(prints)} cells looked at are exactly the same as another one, in {', '.join(paths[:3])}"
            f"{', …' if len(paths) > 3 else ''}. Is something in the data twice? Such cells are trained on and held out at once, "
            "and validation looks better than it is"
        )


def _bits(rows: SparseRows) -> NDArray[np.uint64]:
    """A number for each gene with its value; their sum tells cells apart, in whatever order a cell has its genes."""
    mixed = rows.genes.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= rows.values.astype(np.float32).view(np.uint32).astype(np.uint64) * np.uint64(0xC2B2AE3D27D4EB4F)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    return mixed ^ (mixed >> np.uint64(32))
