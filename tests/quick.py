"""Which tests are quick: they need neither ranks nor a program, and take less than a second.

The first two are found out from a test's code, and from that of the fixtures and helpers that it uses. Of the third a test
says so itself when it takes longer: `@pytest.mark.slow`.
"""

from __future__ import annotations

import multiprocessing
import subprocess
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

import pytest

from shardwise.verify import proof
from tests.cli import program
from tests.distributed.pool import FreshRanks, RankPool

PROCESSES: tuple[Any, ...] = (multiprocessing, subprocess, program.start, proof, proof.verify, RankPool, FreshRanks)
"""Whatever starts a process is one of these, or uses one."""


def is_quick(item: pytest.Item) -> bool:
    if not isinstance(item, pytest.Function) or item.get_closest_marker("slow"):
        return False
    definitions = item._fixtureinfo.name2fixturedefs
    fixtures = [definition.func for name in _asked_for(item) for definition in definitions.get(name, ())]
    return not any(_starts_a_process(each, set()) for each in (item.function, *fixtures))


def _asked_for(item: pytest.Function) -> list[str]:
    """The fixtures that watch over every test do not count."""
    return [name for name in item.fixturenames if name not in ("no_process_outlives_a_test", "request")]


def _starts_a_process(function: Callable[..., Any], seen: set[Any]) -> bool:
    function = getattr(function, "__wrapped__", function)
    if not isinstance(function, FunctionType) or function in seen or not function.__module__.startswith("tests."):
        return False
    seen.add(function)
    used = [function.__globals__.get(name) for name in _names(function.__code__)]
    return any(each is known for each in used for known in PROCESSES) or any(
        _starts_a_process(each, seen) for each in used if callable(each)
    )


def _names(code: CodeType) -> Iterator[str]:
    """Of all that the code refers to, functions inside it included."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)
