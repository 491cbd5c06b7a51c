"""Which room may import which: the map in the design, held."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardwise
from tests.conftest import REPOSITORY

SOURCE = REPOSITORY / "src" / "shardwise"
EVERYTHING = {
    "config",
    "data",
    "parallel",
    "kernels",
    "tasks",
    "checkpoint",
    "watch",
    "engine",
    "launch",
    "plan",
    "bench",
    "verify",
    "drill",
}

# Besides itself, `config` and `errors`, which every room may import.
ALLOWED: dict[str, set[str]] = {
    "config": set(),
    "data": set(),
    "kernels": set(),
    "parallel": {"kernels"},
    "tasks": {"data", "kernels"},
    "checkpoint": {"data", "parallel", "tasks"},
    "watch": set(),
    "engine": {"tasks", "data", "parallel", "kernels", "checkpoint", "watch"},
    "launch": {"watch"},
    "plan": {"tasks", "data", "parallel"},
    "bench": {"tasks", "data", "parallel", "kernels", "checkpoint", "watch", "engine"},
    "drill": {"data", "checkpoint", "engine", "launch"},
    "verify": {"tasks", "data", "parallel", "kernels", "checkpoint", "engine", "launch", "watch"},
    "cli": EVERYTHING,
}


def rooms_imported(source: str, package: str) -> Iterator[tuple[int, str]]:
    """(line, room) of every import of shardwise, those inside functions included. `package` is where the file lies."""
    for node in ast.walk(ast.parse(source)):
        modules: list[str] = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join(
                    [*package.split(".")[: len(package.split(".")) - node.level + 1], *base.split(".")]
                ).strip(".")
            # `from shardwise import Session` reaches into the room where Session is at home
            modules = (
                [shardwise._HOMES.get(a.name, f"shardwise.{a.name}") for a in node.names]
                if base == "shardwise"
                else [base]
            )
        for module in modules:
            top, _, rest = module.partition(".")
            if top == "shardwise" and rest:
                yield node.lineno, rest.partition(".")[0]


def forbidden_in(source: str, room: str, package: str) -> list[str]:
    allowed = ALLOWED[room] | {room, "config", "errors", "__version__"}
    return [f"line {line}: {other}" for line, other in rooms_imported(source, package) if other not in allowed]


FILES = sorted(file for room in ALLOWED for file in (SOURCE / room).rglob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_a_room_imports_only_what_lies_below_it(file: Path) -> None:
    relative = file.relative_to(SOURCE)
    package = ".".join(["shardwise", *relative.parent.parts])
    assert forbidden_in(file.read_text(), relative.parts[0], package) == []


def test_every_room_has_its_row_in_the_table() -> None:
    rooms = {folder.name for folder in SOURCE.iterdir() if any(folder.glob("*.py"))}
    assert rooms - {"__pycache__"} == set(ALLOWED), "a new room says here what it may import"


def test_the_engine_knows_nothing_of_what_is_built_on_it() -> None:
    assert not ALLOWED["engine"] & {"launch", "plan", "verify", "bench", "report", "cli"}


@pytest.mark.parametrize(
    "line",
    [
        "from shardwise.launch.local import run_ranks",
        "import shardwise.launch.local",
        "import shardwise.launch as somewhere",
        "def f():\n    from shardwise.launch import local",
        "from shardwise import launch",
        "from ..launch import local",
        "from .. import launch",
        "from ..launch.local import run_ranks",
    ],
)
def test_a_forbidden_import_is_seen_however_it_is_written(line: str) -> None:
    assert [found.partition(": ")[2] for found in forbidden_in(line, "engine", "shardwise.engine")] == ["launch"]


def test_what_lies_below_and_other_packages_are_let_through() -> None:
    source = "import torch\nimport shardwise\nfrom shardwise import Task, __version__\nfrom . import step\nfrom .step import x\n"
    source += "from shardwise.data import Cursor\nfrom shardwise.errors import DataError\nfrom shardwise.config import Config\n"
    assert forbidden_in(source, "engine", "shardwise.engine") == []
    assert forbidden_in("from shardwise import Session", "tasks", "shardwise.tasks") == ["line 1: engine"]


@pytest.mark.parametrize(
    "module", ["shardwise", "shardwise.errors", "shardwise.config", "shardwise.config.load", "shardwise.cli"]
)
def test_nothing_heavy_is_imported_to_read_a_config(module: str) -> None:
    """A wrong key must be answered at once, and on a machine without torch."""
    program = (
        f"import sys, {module}; print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_a_whole_config_of_a_built_in_task_is_read_without_torch() -> None:
    program = "import sys; from shardwise import load_config; load_config(sys.argv[1]); print('torch' in sys.modules)"
    config = REPOSITORY / "configs" / "chess-tiny.yaml"
    command = [sys.executable, "-c", program, str(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"


def test_tasks_and_the_engine_are_imported_without_what_takes_seconds_and_only_some_runs_need() -> None:
    """The process that starts the ranks waits for none of it; torch.distributed.optim, which compiles eight optimizers when
    it is imported, is for zero1 alone."""
    program = (
        "import sys, shardwise.engine.fit; from shardwise.config.load import BUILT_IN_TASKS, load_task_class\n"
        "for task in BUILT_IN_TASKS: load_task_class(task)\n"
        "heavy = ('monai', 'matplotlib', 'transformers', 'torch.distributed.optim')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
