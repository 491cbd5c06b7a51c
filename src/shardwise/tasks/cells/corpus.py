"""All that is known about the cells of a config: where they are, which are held out, what their genes are called."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import shardwise
from shardwise.errors import ConfigError, DataError
from shardwise.tasks.cells.check import scales_of
from shardwise.tasks.cells.config import FIXED_IN_A_COPY, CellsData
from shardwise.tasks.cells.h5ad import H5adFiles, inspect
from shardwise.tasks.cells.rows import CellSource, Ints, SparseRows, gather
from shardwise.tasks.cells.samples import Split
from shardwise.tasks.cells.shards import ShardedCopy, open_shards
from shardwise.tasks.cells.sources import compare, to_make_a_copy
from shardwise.tasks.cells.synthetic import synthetic_file
from shardwise.tasks.cells.vocabulary import choose_vocabulary

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Corpus:
    genes: dict[str, int]
    counts: bool
    """Whether the values are whole numbers, as counted; else they are taken as normalised already."""
    values: str | None
    """What a sharded copy says of its values; of files, the check says it."""
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
        if not quiet:
            _check_sources(options, copy)
        if seed != copy.seed:
            say = log.debug if quiet else log.info
            say(
                f"{options.paths[0]} was made with seed {copy.seed}, which chose the cells held out; all else follows {seed}"
            )
        nobody = np.empty(0, np.int64)
        corpus = Corpus(
            {gene: number for number, gene in enumerate(copy.genes)},
            copy.counts,
            copy.values,
            copy.training,
            Split(len(copy.training), nobody),
            copy.validation,
            np.arange(len(copy.validation)),
        )
    else:
        paths = h5ad_paths(options, seed)
        _check_once(paths)
        files = [inspect(path, options) for path in paths]
        genes = choose_vocabulary(options.gene_vocab, files, quiet=quiet)
        source = H5adFiles(files, genes, options.label_key)
        if len(source) < 2:
            raise DataError(f"{files[0].path} has one cell only: one to train on and one to validate on are needed")
        split = Split.of(len(source), options.valid_fraction, options.max_valid_cells, seed)
        counts = all(scale.whole or scale.kind == "nothing" for scale in scales_of(source))
        corpus = Corpus(genes, counts, None, source, split, source, split.held_out)
    return corpus


def _check_sources(options: CellsData, copy: ShardedCopy) -> None:
    """A copy of files that have changed since is not what a person means by their names."""
    found = compare(copy.sources)
    folder = options.paths[0]
    if found.changed:
        what = f"the sharded copy {folder} was made from files that have changed since: {'; '.join(found.changed)}"
        if options.changed_sources == "refuse":
            raise DataError(
                f"{what}. To train on the cells as they were, set data.changed_sources: warn. To make it anew:  "
                + to_make_a_copy()
            )
        log.warning(f"{what}. It is trained on as it was made")
    if found.touched:
        log.warning(
            f"{', '.join(found.touched)}: written again since the sharded copy {folder} was made, with the same size and, as far "
            "as was looked, the same content"
        )
    if found.gone:
        log.info(
            f"the sharded copy {folder} was made from {', '.join(found.gone)}, which is not there any more: whether it has "
            "changed cannot be told"
        )
    if copy.made_by != shardwise.__version__:
        log.info(
            f"the sharded copy {folder} was made by shardwise {copy.made_by}; this is {shardwise.__version__}, which reads the "
            "same format"
        )


def _check_once(paths: list[Path]) -> None:
    """A file may be named by a link to it, too."""
    seen: dict[tuple[int, int], Path] = {}
    for path in paths:
        if path.exists():
            about = path.stat()
            if (other := seen.setdefault((about.st_dev, about.st_ino), path)) is not path:
                raise DataError(
                    f"data.paths names {other} twice: its cells would be trained on and held out at once"
                    + ("" if str(other) == str(path) else f". {path} is the same file")
                )


def h5ad_paths(options: CellsData, seed: int) -> list[Path]:
    return [synthetic_file(options, seed)] if options.source == "synthetic" else [Path(p) for p in options.paths]


def _check_wishes(options: CellsData, copy: ShardedCopy) -> None:
    """A key that the copy has fixed may say what the copy was made with, as the config does that it was made from."""
    asked = {key: getattr(options, key) for key in FIXED_IN_A_COPY if key in options.model_fields_set}
    other = [key for key, value in asked.items() if key not in copy.made_with or copy.made_with[key] != value]
    if other:
        made = ", ".join(f"{key}: {json.dumps(copy.made_with[key]) if key in copy.made_with else '?'}" for key in other)
        wanted = ", ".join(f"{key}: {json.dumps(asked[key])}" for key in other)
        raise ConfigError(
            f"data: the sharded copy {options.paths[0]} was made with {made}, and has that fixed, but the config says {wanted}. "
            f"Leave {', '.join(other)} out, or make another copy from the h5ad files:  " + to_make_a_copy()
        )
