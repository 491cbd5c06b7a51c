"""Messages about many things stay short: a few examples, and how many there are."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

LONGEST = 40
"""Letters of a name that are shown."""


def some(names: Sequence[str], how: Callable[[str], str] = str) -> str:
    """A few of them, each as far as it can be read in a message."""
    return ", ".join(how(name if len(name) <= LONGEST else f"{name[:LONGEST]}…") for name in names[:3])


def for_all_files(told: Iterable[tuple[Path, str]]) -> list[str]:
    """What is to be told of files of which the same holds: of three or more, the message of the first, and which others."""
    (_, first), *others = told
    if len(others) < 2:
        return [first, *(text for _, text in others)]
    named = ", ".join(str(path) for path, _ in others[:3]) + (", …" if len(others) > 3 else "")
    return [f"{first}. The same holds, with other numbers, for {len(others)} more files: {named}"]


def shape_of(message: str, path: Path) -> str:
    """Two messages that differ in the file and in numbers have the same."""
    return re.sub(r"[^A-Za-z]+", " ", message.replace(str(path), ""))
