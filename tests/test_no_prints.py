"""One voice: library code logs, and only the result of a verb is printed, in one place."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_layers import SOURCE

PRINTS = "cli/output.py"
"""Where the result of a verb is printed."""
WRITES = "watch/console.py"
"""Where what is logged is written."""


def spoken(source: str) -> Iterator[str]:
    """Lines that speak past the logger: print(…), sys.stdout.write(…), logging.info(…), traceback.print_exc()."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        past = called in ("print", "pprint", "pprint.pprint", "logging.basicConfig", "traceback.print_exc")
        past = past or called.startswith(("sys.stdout.write", "sys.stderr.write", "sys.__std"))
        past = past or called in [f"logging.{level}" for level in ("debug", "info", "warning", "error", "exception")]
        if past:
            yield f"line {node.lineno}: {called}"


@pytest.mark.parametrize("file", sorted(SOURCE.rglob("*.py")), ids=lambda file: str(file.relative_to(SOURCE)))
def test_nothing_is_printed_past_the_logger(file: Path) -> None:
    name = file.relative_to(SOURCE).as_posix()
    found = list(spoken(file.read_text()))
    if name == PRINTS:
        assert [each.partition(": ")[2] for each in found] == ["print"]
    elif name == WRITES:
        assert [each.partition(": ")[2] for each in found] == ["sys.stderr.write"]
    else:
        assert found == [], f"{name}: use logging.getLogger(__name__), or cli/output.py for the result of a verb"
