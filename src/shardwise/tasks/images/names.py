"""Names of classes: which are one and the same, and which only look alike."""

from __future__ import annotations

import logging
import unicodedata
from collections import defaultdict
from collections.abc import Iterable

log = logging.getLogger(__name__)

SHOWN = 5


def one_form(name: str) -> str:
    """An accent can be a character of its own, or part of its letter (NFD, NFC): a Mac and Linux write the same name in both
    ways, and nobody sees a difference."""
    return unicodedata.normalize("NFC", name)


def numbers_of(names: Iterable[str]) -> dict[str, int]:
    return {one_form(name): number for number, name in enumerate(names)}


def tell_alike(classes: list[str]) -> None:
    """Classes whose names differ in capitals or spaces alone: one class that was written in two ways?"""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in classes:
        groups["".join(one_form(name).lower().split())].append(name)
    alike = [" and ".join(map(repr, names)) for names in groups.values() if len(names) > 1]
    if alike:
        more = f", and {len(alike) - SHOWN} more" if len(alike) > SHOWN else ""
        log.warning(
            f"the names of some classes differ in capitals or spaces alone: {'; '.join(alike[:SHOWN])}{more}. Each is learned as "
            "a class of its own: if they are one, give them one name"
        )
