"""The result of a verb: a table, a JSON document, a sentence. It goes to stdout; everything else is logged, to stderr."""

from __future__ import annotations


def show(text: str = "", *, end: str = "\n") -> None:
    print(text, end=end, flush=True)
