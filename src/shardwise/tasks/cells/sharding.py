"""Writing a sharded copy, with memory for one shard: scatter the rows over bins, then shuffle each bin."""

from __future__ import annotations

import contextlib
import logging
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import shardwise
from shardwise.config.seeds import Purpose
from shardwise.data.manifest import FileEntry, entry_of, flush, write_manifest
from shardwise.errors import DataError
from shardwise.tasks.cells.check import check_cells
from shardwise.tasks.cells.config import FIXED_IN_A_COPY, CellsData
from shardwise.tasks.cells.corpus import Corpus, open_corpus
from shardwise.tasks.cells.rows import Ints, SparseRows, stack
from shardwise.tasks.cells.shards import KIND, arrow_batch, rows_in, write_shard
from shardwise.tasks.cells.sources import FORMAT, compare, sources_of
from shardwise.tasks.cells.vocabulary import NOT_SHIPPED

PIECE = 8192
"""Rows read at a time."""
MOST_BINS = 512
"""Every bin is an open file while the rows are scattered."""

_NOBODY = arrow_batch(
    SparseRows(np.zeros(1, np.int64), np.empty(0, np.int32), np.empty(0, np.float32)),
    np.empty(0, np.int64),
    np.empty(0, np.int64),
)
"""What a bin without cells holds; what the other bins hold looks the same."""

log = logging.getLogger(__name__)


def shard_cells(options: CellsData, seed: int, target: Path, *, cells_per_shard: int) -> Path:
    """Copy the cells of a config into `target`. Whole when it returns; not there at all if anything went wrong."""
    if options.source == "shards":
        raise DataError("data.source: shards is a sharded copy already; give a config that reads h5ad files")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise DataError(f"--to {target} is there already and not empty: name a new folder")
    corpus = open_corpus(options, seed, quiet=False)
    values = check_cells(corpus.training, options, twins=True)
    sources = sources_of(_read_by(options))
    aside = target.with_name(f".{target.name}.writing")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        about = _write(corpus, aside, cells_per_shard, seed) | {
            "format": FORMAT,
            "shardwise": shardwise.__version__,
            "sources": sources,
            "seed": seed,
            "values": values,
            "made_with": {key: getattr(options, key) for key in FIXED_IN_A_COPY},
        }
        changed = compare(sources)
        if changed.changed or changed.touched or changed.gone:
            raise DataError(
                f"{', '.join([*changed.changed, *changed.touched, *changed.gone])}: changed while it was copied. Copy it when "
                "nobody writes it"
            )
        files: dict[str, FileEntry] = {}
        for file in sorted(aside.glob("*.arrow")):
            flush(file)
            files[file.name] = entry_of(file)
        write_manifest(aside, files, about)
        if target.exists():
            target.rmdir()
        aside.rename(target)
        flush(target.parent)
    except OSError as error:
        raise DataError(f"the copy could not be written to {target}: {error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return target


def _read_by(options: CellsData) -> list[Path]:
    """Every file that the copy follows from. Synthetic cells follow from the config alone."""
    if options.source == "synthetic":
        return []
    vocabulary = options.gene_vocab
    given = [Path(vocabulary)] if vocabulary is not None and vocabulary != NOT_SHIPPED else []
    return [Path(path) for path in options.paths] + given


def _write(corpus: Corpus, folder: Path, cells_per_shard: int, seed: int) -> dict[str, Any]:
    count = -(-corpus.split.kept // cells_per_shard)
    if count > MOST_BINS:
        raise DataError(
            f"{corpus.split.kept} cells make {count} shards of {cells_per_shard}; at most {MOST_BINS} can be made. Set "
            f"--cells-per-shard to {-(-corpus.split.kept // MOST_BINS)} or more"
        )
    rng = np.random.default_rng([seed, Purpose.ORDER])
    names, largest = _scatter(corpus, folder, count, rng)
    genes = np.uint16 if len(corpus.genes) <= 2**16 else np.uint32
    values = np.uint16 if largest is not None and largest < 2**16 else np.float32
    shards: dict[str, dict[str, int]] = {"train": {}, "valid": {}}
    for number in range(count + 1):
        rows, cells, labels = _collected(folder / f"{number}.bin")
        part, order = ("train", rng.permutation(len(cells))) if number < count else ("valid", np.argsort(cells))
        if len(cells):
            name = f"{part}-{number % count:05d}.arrow"
            write_shard(folder / name, rows.take(order), cells[order], labels[order], genes, values)
            shards[part][name] = len(cells)
        (folder / f"{number}.bin").unlink()
    return {
        "kind": KIND,
        "shards": shards,
        "counts": corpus.counts,
        "labels": names,
        "genes": list(corpus.genes),
    }


def _scatter(corpus: Corpus, folder: Path, count: int, rng: np.random.Generator) -> tuple[list[str], float | None]:
    """Every row into a bin drawn at random, those held out into the last one. Returns the names of the labels, and the
    largest value if all values are whole numbers."""
    source, split = corpus.training, corpus.split
    codes, names = source.labels() or (np.full(len(source), -1, np.int64), [])
    largest: float | None = 0.0
    began = said = time.monotonic()
    with contextlib.ExitStack() as stack:
        bins = [
            stack.enter_context(pa.ipc.new_stream(str(folder / f"{n}.bin"), _NOBODY.schema)) for n in range(count + 1)
        ]
        for first in range(0, len(source), PIECE):
            rows = source.read(first, min(first + PIECE, len(source)))
            numbers = np.arange(first, first + len(rows))
            bin_of = np.where(np.isin(numbers, split.held_out), count, rng.integers(0, count, size=len(rows)))
            for number in np.unique(bin_of).tolist():
                chosen = np.flatnonzero(bin_of == number)
                bins[number].write_batch(arrow_batch(rows.take(chosen), numbers[chosen], codes[numbers[chosen]]))
            if largest is not None and len(rows.values):
                whole = rows.values.dtype.kind in "iu" or (rows.values == np.round(rows.values)).all()
                largest = max(largest, float(rows.values.max())) if whole else None
            if time.monotonic() - said > 10:
                said = time.monotonic()
                log.info(f"{first / len(source):.0%} of {len(source)} cells after {said - began:.0f} s")
    return names, largest


def _collected(file: Path) -> tuple[SparseRows, Ints, Ints]:
    with pa.ipc.open_stream(str(file)) as reader:
        batches = list(reader)
    batches = batches or [_NOBODY]
    cells, labels = (np.concatenate([batch.column(name).to_numpy() for batch in batches]) for name in ("cell", "label"))
    return stack([rows_in(batch) for batch in batches]), cells, labels
