"""All that is known about the cells of a config: where they are, which are held out, what their genes are called."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardwise.config.commands import command
from shardwise.errors import ConfigError, DataError
from shardwise.tasks.cells.config import FIXED_IN_A_COPY, CellsData
from shardwise.tasks.cells.h5ad import H5adFile, H5adFiles, inspect, pieces_to_check
from shardwise.tasks.cells.rows import CellSource, Ints, SparseRows, gather
from shardwise.tasks.cells.samples import Split
from shardwise.tasks.cells.shards import ShardedCopy, open_shards
from shardwise.tasks.cells.synthetic import synthetic_file
from shardwise.tasks.cells.vocabulary import choose_vocabulary

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Corpus:
    genes: dict[str, int]
    counts: bool
    """Whether the values are whole numbers, as counted; else they are taken as normalised already."""
    training: CellSource
    split: Split
    """Which rows of `training` are trained on."""
    validation: CellSource
    held_out: Ints
    """The rows of `validation` to validate on."""

    def validation_cells(self) -> tuple[SparseRows, Ints, Ints | None, list[str]]:
        """The cells held out, their numbers, their labels if they have any, and the labels' names."""
        rows = gather(self.validation, self.held_out)
        labels = self.validation.labels()
        if labels is None:
            return rows, self.validation.numbers(self.held_out), None, []
        codes, names = labels
        return rows, self.validation.numbers(self.held_out), codes[self.held_out], names


def open_corpus(options: CellsData, seed: int, *, quiet: bool = True) -> Corpus:
    """Open what the config names. `quiet=False` says what was found."""
    if options.source == "shards":
        copy = open_shards(Path(options.paths[0]))
        _check_wishes(options, copy)
        if seed != copy.seed:
            say = log.debug if quiet else log.info
            say(
                f"{options.paths[0]} was made with seed {copy.seed}, which chose the cells held out; all else follows {seed}"
            )
        nobody = np.empty(0, np.int64)
        corpus = Corpus(
            {gene: number for number, gene in enumerate(copy.genes)},
            copy.counts,
            copy.training,
            Split(len(copy.training), nobody),
            copy.validation,
            np.arange(len(copy.validation)),
        )
    else:
        paths = h5ad_paths(options, seed)
        twice = [path for path in paths if [other.resolve() for other in paths].count(path.resolve()) > 1]
        if twice:
            raise DataError(f"data.paths names {twice[0]} twice: its cells would be trained on and held out at once")
        files = [inspect(path, options) for path in paths]
        genes = choose_vocabulary(options.gene_vocab, files, quiet=quiet)
        source = H5adFiles(files, genes, options.label_key)
        if len(source) < 2:
            raise DataError(f"{files[0].path} has one cell only: one to train on and one to validate on are needed")
        split = Split.of(len(source), options.valid_fraction, options.max_valid_cells, seed)
        corpus = Corpus(genes, _are_counts(files, source), source, split, source, split.held_out)
    return corpus


def h5ad_paths(options: CellsData, seed: int) -> list[Path]:
    return [synthetic_file(options, seed)] if options.source == "synthetic" else [Path(p) for p in options.paths]


def check_values(corpus: Corpus) -> None:
    """Read the cells once, or, of a huge corpus, pieces spread evenly over it: bad values are told before training."""
    source = corpus.training
    corpus.validation.labels()
    began = said = time.monotonic()
    for first, last in pieces_to_check(len(source)):
        source.read(first, last)
        if time.monotonic() - said > 10:
            said = time.monotonic()
            log.info(f"checking the cells: {last / len(source):.0%} after {said - began:.0f} s")


def _check_wishes(options: CellsData, copy: ShardedCopy) -> None:
    """A key that the copy has fixed may say what the copy was made with, as the config does that it was made from."""
    asked = {key: getattr(options, key) for key in FIXED_IN_A_COPY if key in options.model_fields_set}
    other = [key for key, value in asked.items() if key not in copy.made_with or copy.made_with[key] != value]
    if other:
        made = ", ".join(f"{key}: {json.dumps(copy.made_with[key]) if key in copy.made_with else '?'}" for key in other)
        wanted = ", ".join(f"{key}: {json.dumps(asked[key])}" for key in other)
        raise ConfigError(
            f"data: the sharded copy {options.paths[0]} was made with {made}, and has that fixed, but the config says {wanted}. "
            f"Leave {', '.join(other)} out, or make another copy from the h5ad files:  "
            + command("data", "shard", "CONFIG", "--to", "FOLDER")
        )


def _are_counts(files: list[H5adFile], source: H5adFiles) -> bool:
    """The first cells of each file decide."""
    kinds = {}
    for file, start in zip(files, source.bounds[:-1].tolist(), strict=True):
        values = source.read(start, start + min(file.cells, 256)).values
        kinds[file.path] = bool((values == np.round(values)).all())
    if len(set(kinds.values())) > 1:
        whole, other = (next(path for path, kind in kinds.items() if kind is wanted) for wanted in (True, False))
        raise DataError(
            f"{whole} holds whole numbers (counts) and {other} does not: they cannot be trained on together. Use a layer "
            "that is the same in all of them (data.layer)"
        )
    return next(iter(kinds.values()))
