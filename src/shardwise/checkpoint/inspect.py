"""Whether a checkpoint is whole: its files are what the manifest says, and they hold what the index promises.

The one place that says so: for resume, export, verify and `shardwise checkpoint verify` alike. Of the tensors it reads headers
alone; their bytes are the checksums' business.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from shardwise.checkpoint.index import INDEX, HeaderEntry, IndexEntry, read_header, read_index
from shardwise.data.manifest import NAME, Condition, condition_of, read_manifest

MOST_NAMED = 5
"""Problems that are told one by one: a file that lacks one tensor may lack a thousand."""


def condition_of_checkpoint(folder: Path, *, part: tuple[int, int] = (0, 1)) -> Condition:
    """With `part` k of n, every n-th file and tensor is looked at, so that n processes share them."""
    condition = condition_of(folder, part=part)
    if condition.problems:
        return condition
    try:
        problems = _broken_promises(folder, set(read_manifest(folder)["files"]), part)
    except ValueError as error:
        return Condition([str(error)], [])
    except OSError as error:
        return Condition([], [f"{Path(str(error.filename)).name} cannot be read: {error.strerror}"])
    more = len(problems) - MOST_NAMED
    return Condition(problems[:MOST_NAMED] + ([f"and {more} more of these"] if more > 0 else []), [])


def _broken_promises(folder: Path, listed: set[str], part: tuple[int, int]) -> list[str]:
    """What the index promises, and is not there."""
    if INDEX not in listed:
        raise ValueError(f"the manifest does not list {INDEX}, without which nothing can be loaded")
    try:
        index = read_index(folder)
    except ValueError as error:
        raise ValueError(f"{INDEX} is not an index of tensors: {error}") from None
    number, of = part
    promised = _by_file(index)
    problems = [
        f"{INDEX} names the file {file!r:.80}, which the manifest does not list"
        for file in sorted(promised.keys() - (listed - {INDEX, NAME}))
    ]
    problems += [
        f"the parts of {name!r:.80} in {INDEX} are not the whole of it, each number once"
        for name, entry in list(index.items())[number::of]
        if not entry.is_covered()
    ]
    for file in sorted(promised.keys() & (listed - {INDEX, NAME}))[number::of]:
        problems += _missing_in(file, read_header(folder / file), promised[file])
    return problems


def _by_file(index: dict[str, IndexEntry]) -> dict[str, list[tuple[str, HeaderEntry]]]:
    """What each file is to hold, as its header would say it."""
    promised: dict[str, list[tuple[str, HeaderEntry]]] = defaultdict(list)
    for name, entry in index.items():
        for chunk in entry.chunks:
            promised[chunk.file].append((entry.key_of(name, chunk), HeaderEntry(entry.dtype or "", chunk.sizes)))
    return promised


def _missing_in(file: str, header: dict[str, HeaderEntry], promised: list[tuple[str, HeaderEntry]]) -> list[str]:
    problems = []
    for key, entry in promised:
        found = header.get(key)
        if found is None:
            problems.append(f"{file} does not hold {key!r:.80}, which {INDEX} promises")
        elif found != entry and not (entry.dtype == "" and found.dtype == "U8" and len(found.shape) == 1):
            shape = "×".join(map(str, found.shape[:8])) or "one number"
            problems.append(f"{file} holds {key!r:.80} as {found.dtype}, {shape}, and {INDEX} promises otherwise")
    return problems
