"""Which gene has which number."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from shardwise.errors import DataError
from shardwise.tasks.cells.h5ad import H5adFile

NOT_SHIPPED = "human_protein_coding"

log = logging.getLogger(__name__)


def choose_vocabulary(gene_vocab: str | None, files: Sequence[H5adFile], *, quiet: bool = True) -> dict[str, int]:
    """From a file, or every gene of the data in order of appearance. Says what does not fit."""
    say = log.debug if quiet else log.info
    if gene_vocab is None or gene_vocab == NOT_SHIPPED:
        genes = list(dict.fromkeys(gene for file in files for gene in file.genes))
        why = f"gene_vocab: {NOT_SHIPPED} does not come with shardwise, so " if gene_vocab else ""
        say(f"{why}the vocabulary is the {len(genes)} genes of the data; give a file as data.gene_vocab to fix it")
    else:
        genes = _read(Path(gene_vocab))
    vocabulary = {gene: number for number, gene in enumerate(genes)}
    for file in files:
        known = sum(gene in vocabulary for gene in file.genes)
        if not known:
            raise DataError(
                f"{file.path} has no gene in common with {gene_vocab}: it names genes like {_some(file.genes)}, the "
                f"vocabulary like {_some(genes)}. Another column of var may have those names: set data.gene_key"
            )
        skipped_batches = [gene for gene in file.genes if gene not in vocabulary]
        if skipped_batches or known < len(genes):
            others = (
                f"; {len(skipped_batches)} others are not in it and left out ({_some(skipped_batches)}, …)"
                if skipped_batches
                else ""
            )
            say(f"{file.path} has {known} of the {len(genes)} genes of the vocabulary{others}")
    return vocabulary


def _read(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"data.gene_vocab: {path} cannot be read ({error}). It must be a text file with one gene per line, a JSON "
            f"list, or {NOT_SHIPPED}"
        ) from None
    if path.suffix == ".json":
        try:
            content = json.loads(text)
        except json.JSONDecodeError as error:
            raise DataError(f"data.gene_vocab: {path} is not JSON: {error}") from None
        genes = [str(gene) for gene in content] if isinstance(content, list | dict) else []
    else:
        genes = [line.strip() for line in text.splitlines() if line.strip()]
    if not genes:
        raise DataError(f"data.gene_vocab: {path} names no genes")
    if len(set(genes)) < len(genes):
        raise DataError(f"data.gene_vocab: {path} names {len(genes) - len(set(genes))} genes more than once")
    return genes


def _some(genes: Sequence[str]) -> str:
    return ", ".join(genes[:3])
