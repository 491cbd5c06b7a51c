"""Which gene has which number."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwise.errors import DataError
from shardwise.tasks.cells.genes import name_columns
from shardwise.tasks.cells.h5ad import H5adFile
from shardwise.tasks.cells.wording import for_all_files, shape_of, some

NOT_SHIPPED = "human_protein_coding"

log = logging.getLogger(__name__)


def choose_vocabulary(gene_vocab: str | None, files: Sequence[H5adFile], *, quiet: bool = True) -> dict[str, int]:
    """From a file, or every gene of the data in order of appearance. Says what does not fit."""
    say, warn = (log.debug, log.debug) if quiet else (log.info, log.warning)
    notes: defaultdict[str, list[tuple[Path, str]]] = defaultdict(list)
    for file in files:
        for note in file.notes:
            notes[shape_of(note, file.path)].append((file.path, note))
    for alike in notes.values():
        _tell(alike, warn)
    if gene_vocab is None or gene_vocab == NOT_SHIPPED:
        _check_names(files, None, warn)
        _check_shared(files, warn)
        genes = list(dict.fromkeys(gene for file in files for gene in file.genes if gene))
        if not quiet:
            _check_spelling(genes, warn)
        why = f"gene_vocab: {NOT_SHIPPED} does not come with shardwise, so " if gene_vocab else ""
        say(f"{why}the vocabulary is the {len(genes)} genes of the data; give a file as data.gene_vocab to fix it")
    else:
        genes = _read(Path(gene_vocab))
        _check_names(files, gene_vocab, warn)
    if len(genes) == 1:
        warn(f"the vocabulary is one gene, {some(genes)}: there are no others to predict it from")
    vocabulary = {gene: number for number, gene in enumerate(genes)}
    fitting: list[tuple[Path, str]] = []
    misfits: list[tuple[Path, str]] = []
    for file in files:
        present = _named(file)
        known = sum(gene in vocabulary for gene in present)
        if not known:
            raise DataError(
                f"{file.path} has no gene in common with {gene_vocab}: it names genes like {some(present)}, the "
                f"vocabulary like {some(genes)}. {_which_column(file, vocabulary)}"
            )
        left_out = [gene for gene in present if gene not in vocabulary]
        if left_out or known < len(genes):
            others = f"; {len(left_out)} others are not in it and left out ({some(left_out)}, …)" if left_out else ""
            text = f"{file.path} has {known} of the {len(genes)} genes of the vocabulary{others}"
            if left_out and 2 * known < min(len(present), len(genes)):
                text = (
                    f"{text}. Most genes do not fit: does {gene_vocab} name them otherwise ({some(genes)})? "
                    f"{_which_column(file, vocabulary)}"
                )
                misfits.append((file.path, text))
            else:
                fitting.append((file.path, text))
    _tell(misfits, warn)
    _tell(fitting, say)
    return vocabulary


def _check_names(files: Sequence[H5adFile], gene_vocab: str | None, warn: Callable[[str], None]) -> None:
    """Genes that nobody has named: they can be trained on in one file, but nothing tells which they are."""
    for file in files:
        if not file.numbered:
            continue
        present = _named(file)
        what = (
            f"{file.path}: its genes have no names but row numbers ({some(present)}, …, {present[-1]}) in the index of "
            f"{file.table}"
        )
        columns = name_columns(file.path, file.table, file.gene_column)
        if columns:
            listed = "; ".join(f"{name}: {some(names)}" for name, names in list(columns.items())[:4])
            raise DataError(
                f"{what}. Set data.gene_key to the column with their names ({listed}), or to {file.gene_column} to train "
                "on the numbers all the same"
            )
        if len(files) > 1 or gene_vocab:
            against = gene_vocab or "the other files"
            raise DataError(
                f"{what}, which say nothing about which genes of {against} they are. Name them (adata.var_names = …; "
                f"adata.write_h5ad(…)). If the numbers do mean the same genes everywhere, say so with data.gene_key: "
                f"{file.gene_column}"
            )
        warn(f"{what}. They are trained on as they are, but a model of them can be used with no other file")


def _check_shared(files: Sequence[H5adFile], warn: Callable[[str], None]) -> None:
    """Files whose genes are all different are named otherwise (Ensembl ids, symbols), or of different species."""
    if len(files) < 2:
        return
    having = Counter(gene for file in files for gene in file.genes if gene)
    first = _connected(files)
    apart = next((file for file in files if file.path not in first), None)
    if apart is not None:
        one = files[0]
        known = {gene: 0 for file in files if file.path in first for gene in file.genes if gene}
        raise DataError(
            f"{apart.path} has no gene in common with {one.path}: one names genes like {some(_named(apart))}, the other "
            f"like {some(_named(one))}. They would be trained on as different genes. {_which_column(apart, known)}. If they "
            "are different genes indeed, name them all in a file: data.gene_vocab"
        )
    apart_from_others: list[tuple[Path, str]] = []
    for file in files:
        own = _named(file)
        shared = sum(having[gene] > 1 for gene in own)
        others = sum(1 for gene, number in having.items() if number > (gene in file.gene_set))
        if 2 * shared < min(len(own), others):
            alone = [gene for gene in own if having[gene] == 1]
            text = (
                f"{file.path} has {shared} of its {len(own)} genes in common with the other files; only there: "
                f"{some(alone)}, …. Genes that are named otherwise are trained on as different genes. "
                f"{_which_column(file, having)}"
            )
            apart_from_others.append((file.path, text))
    _tell(apart_from_others, warn)


_VERSIONED = re.compile(r"(ENS[A-Z]*\d{6,}|[NX][MR]_\d+)\.\d+$")
"""An Ensembl or RefSeq id with its version. In other names, a number after a dot belongs to the name."""


def _check_spelling(genes: Sequence[str], warn: Callable[[str], None]) -> None:
    spellings: defaultdict[str, list[str]] = defaultdict(list)
    for gene in genes:
        spellings[_VERSIONED.sub(r"\1", gene).upper()].append(gene)
    several = [names for names in spellings.values() if len(names) > 1]
    if several:
        pairs = "; ".join(some(names) for names in several[:3])
        warn(
            f"genes whose names differ only in case or version, {len(several)} in all, are trained on as different ones: "
            f"{pairs}. Where they are the same, write them alike, or choose another column with data.gene_key"
        )


def _tell(told: Sequence[tuple[Path, str]], say: Callable[[str], None]) -> None:
    for text in for_all_files(told) if told else ():
        say(text)


def _connected(files: Sequence[H5adFile]) -> set[Path]:
    """The files that share genes with the first, directly or by way of others."""
    found, genes = {files[0].path}, set(_named(files[0]))
    grew = True
    while grew:
        grew = False
        for file in files:
            if file.path not in found and not genes.isdisjoint(file.gene_set):
                found.add(file.path)
                genes |= file.gene_set
                grew = True
    return found


def _which_column(file: H5adFile, wanted: Mapping[str, int]) -> str:
    """The column of var with the names that are wanted."""
    fitting = {
        name: sum(gene in wanted for gene in names)
        for name, names in name_columns(file.path, file.table, file.gene_column).items()
    }
    best = max(fitting, key=fitting.__getitem__, default=None)
    if best is None or 2 * fitting[best] <= len(file.genes):
        return "Another column of var may have those names: set data.gene_key"
    return (
        f"Its column {best!r} of var has {fitting[best]} of them: set data.gene_key: {best}, or, where not all files have "
        f"that column, adata.var_names = adata.var[{best!r}] and write it again"
    )


def _named(file: H5adFile) -> list[str]:
    return [gene for gene in file.genes if gene]


def _read(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8-sig")
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
        if not _are_names(content):
            raise DataError(
                f"data.gene_vocab: {path} begins with {some([text.strip()], repr)}, and is expected to be a list of names "
                '(["TP53", …]), or an object with the names as keys and their numbers as values'
            )
        listed = [str(gene).strip() for gene in content]
        genes = [gene for gene in listed if gene]
    else:
        genes = [line.strip() for line in text.splitlines() if line.strip()]
        for mark, called in ((",", "comma"), ("\t", "tab"), (";", "semicolon")):
            if 2 * sum(mark in gene for gene in genes) > len(genes):
                raise DataError(
                    f"data.gene_vocab: {path} looks {called}-separated, and one gene per line is expected: its first line is "
                    f"{some(genes[:1], repr)}"
                )
    if not genes:
        raise DataError(f"data.gene_vocab: {path} names no genes")
    if len(set(genes)) < len(genes):
        twice = [gene for gene, times in Counter(genes).items() if times > 1]
        raise DataError(
            f"data.gene_vocab: {path} names {len(genes) - len(set(genes))} genes more than once, for example {some(twice)}. "
            "Name each once"
        )
    return genes


def _are_names(content: Any) -> bool:
    if isinstance(content, dict):
        return all(isinstance(number, int) for number in content.values())
    return isinstance(content, list) and all(isinstance(gene, str | int) for gene in content)
