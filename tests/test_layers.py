"""Which room may import which: the table in CONTRIBUTING.md, held. No module imports itself through others."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardwise
from shardwise.config import Block
from shardwise.config.load import built_in_blocks, load_task_class, task_blocks
from shardwise.config.registry import BUILT_IN
from tests.conftest import REPOSITORY

SOURCE = REPOSITORY / "src" / "shardwise"
ROW = re.compile(r"^\| `src/shardwise/(\w+)/` \| (.+) \| (.+) \|$", re.MULTILINE)
NAMES = re.compile(r"`\w+`(, `\w+`)*")


def rooms_of(contributing: str) -> dict[str, set[str]]:
    """What each room may import besides itself, `config`, `errors` and `compat`, from the table in CONTRIBUTING.md."""
    cells = {room: allowed for room, _, allowed in ROW.findall(contributing)}
    for room, cell in cells.items():
        assert cell in ("nothing", "everything") or NAMES.fullmatch(cell), f"CONTRIBUTING.md, {room}: {cell!r}"
    rooms = {
        room: set(cells) if cell == "everything" else set(re.findall(r"\w+", cell)) for room, cell in cells.items()
    }
    return {room: allowed - {"nothing"} for room, allowed in rooms.items()}


CONTRIBUTING = (REPOSITORY / "CONTRIBUTING.md").read_text()
ALLOWED = rooms_of(CONTRIBUTING)


def modules_imported(source: str, package: str) -> Iterator[tuple[int, str]]:
    """(line, module) of every import of shardwise, wherever it stands. `package` is where the file lies. What follows
    `import` may be a module or a name in one; the facade `shardwise` stands for the module where the name is at home."""
    for node in ast.walk(ast.parse(source)):
        modules: list[str] = []
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        else:
            base = node.module or ""
            if node.level:
                above = package.split(".")
                base = ".".join([*above[: len(above) - node.level + 1], *base.split(".")]).strip(".")
            modules = [
                shardwise._HOMES.get(a.name, f"shardwise.{a.name}") if base == "shardwise" else f"{base}.{a.name}"
                for a in node.names
            ]
        for module in modules:
            if module.startswith("shardwise."):
                yield node.lineno, module.removeprefix("shardwise.")


def forbidden_in(source: str, room: str, package: str) -> list[str]:
    allowed = ALLOWED[room] | {room, "config", "errors", "compat", "__version__"}
    rooms = dict.fromkeys((line, module.partition(".")[0]) for line, module in modules_imported(source, package))
    return [f"line {line}: {other}" for line, other in rooms if other not in allowed]


FILES = sorted(file for room in ALLOWED for file in (SOURCE / room).rglob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_a_room_imports_only_what_lies_below_it(file: Path) -> None:
    relative = file.relative_to(SOURCE)
    package = ".".join(["shardwise", *relative.parent.parts])
    assert forbidden_in(file.read_text(), relative.parts[0], package) == []


def test_every_room_has_its_row_in_the_table() -> None:
    rooms = {folder.name for folder in SOURCE.iterdir() if any(folder.glob("*.py"))}
    assert rooms == set(ALLOWED), "a new room says in CONTRIBUTING.md what it may import"
    assert set().union(*ALLOWED.values()) <= rooms, "the table names a room that is not there"


def test_files_named_in_the_table_exist() -> None:
    for room, text, _ in ROW.findall(CONTRIBUTING):
        for name in re.findall(r"`(\w+\.py)`", text):
            assert (SOURCE / room / name).exists(), f"CONTRIBUTING.md, {room}: {name}"


def test_a_cell_of_the_table_that_cannot_be_read_is_an_error() -> None:
    assert rooms_of("| `src/shardwise/a/` | x | nothing |\n| `src/shardwise/b/` | x | `a`, `c` |\n") == {
        "a": set(),
        "b": {"a", "c"},
    }
    with pytest.raises(AssertionError, match="all of the above"):
        rooms_of("| `src/shardwise/a/` | x | all of the above |\n")


def import_graph(sources: dict[str, str], packages: set[str]) -> dict[str, set[str]]:
    """Which module imports which. A package that a module lies in is imported with it by Python itself: that does not count."""
    graph: dict[str, set[str]] = {}
    for module, source in sources.items():
        package = f"shardwise.{module}" if module in packages else f"shardwise.{module}".rpartition(".")[0]
        names = {name for _, name in modules_imported(source, package)}
        graph[module] = {name if name in sources else name.rpartition(".")[0] for name in names} & (
            sources.keys() - {module}
        )
    return graph


def cycles_in(graph: dict[str, set[str]]) -> list[str]:
    """The shortest cycle through every import that lies on one, each told once."""
    found = set()
    for module, imported in graph.items():
        for start in imported:
            if back := shortest_path(graph, start, module):
                first = back.index(min(back))
                found.add(" → ".join([*back[first:], *back[:first], back[first]]))
    return sorted(found)


def shortest_path(graph: dict[str, set[str]], start: str, end: str) -> list[str]:
    paths = [[start]]
    seen = {start}
    for path in paths:
        if path[-1] == end:
            return path
        fresh = sorted(graph[path[-1]] - seen)
        seen.update(fresh)
        paths.extend([*path, module] for module in fresh)
    return []


def test_no_module_imports_itself_through_others() -> None:
    """The facade `shardwise/__init__.py` is left out: it names what users import, and nothing of it is imported in here
    but the version."""
    sources, packages = {}, set()
    for file in sorted(SOURCE.rglob("*.py")):
        parts = file.relative_to(SOURCE).with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
            packages.add(".".join(parts))
        if parts:
            sources[".".join(parts)] = file.read_text()
    cycles = cycles_in(import_graph(sources, packages))
    assert cycles == [], "modules that import each other"


@pytest.mark.parametrize(
    "line",
    [
        "from shardwise.a.one import x",
        "import shardwise.a.one",
        "from . import one",
        "from .one import x",
        "if TYPE_CHECKING:\n    from shardwise.a.one import x",
        "def f():\n    from shardwise.a import one",
    ],
)
def test_a_cycle_is_seen_however_it_is_written(line: str) -> None:
    sources = {"a": "", "a.one": "from shardwise.b import two", "b": "", "b.two": "from shardwise.a import three"}
    assert cycles_in(import_graph({**sources, "a.three": ""}, {"a", "b"})) == []
    assert cycles_in(import_graph({**sources, "a.three": line}, {"a", "b"})) == ["a.one → b.two → a.three → a.one"]


def test_a_package_and_its_own_module_may_form_a_cycle_too() -> None:
    sources = {"a": "from shardwise.a.one import x", "a.one": "from shardwise.a import y"}
    assert cycles_in(import_graph(sources, {"a"})) == ["a → a.one → a"]


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


def test_configs_of_all_built_in_tasks_are_read_without_torch() -> None:
    """And without numpy, and without the package of any extra."""
    program = (
        "import sys; from shardwise import load_config\n"
        "from shardwise.config.registry import BUILT_IN\n"
        "tasks = {load_config(file).task for file in sys.argv[1:]}\n"
        "assert tasks == set(BUILT_IN['shardwise.tasks']), tasks\n"
        "heavy = ('torch', 'numpy', 'transformers', 'chess', 'anndata', 'monai', 'PIL', 'wandb', 'tensorboard')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    configs = [str(file) for file in sorted((REPOSITORY / "configs").glob("*.yaml"))]
    command = [sys.executable, "-c", program, *configs]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_a_task_is_a_folder_with_a_config_and_one_line_in_the_registry() -> None:
    folders = {file.parent for file in (SOURCE / "tasks").glob("*/__init__.py")}
    assert {folder.name for folder in folders} == set(BUILT_IN["shardwise.tasks"])
    for task in BUILT_IN["shardwise.tasks"]:
        own = {key: block for key, block in task_blocks(load_task_class(task)).items() if block is not Block}
        assert built_in_blocks(task) == own, "config.py and the class name the same blocks"


def test_tasks_and_the_engine_are_imported_without_what_takes_seconds_and_only_some_runs_need() -> None:
    """The process that starts the ranks waits for none of it; torch.distributed.optim, which compiles eight optimizers when
    it is imported, is for zero1 alone."""
    program = (
        "import sys, shardwise.engine.fit; from shardwise.config.load import load_task_class\n"
        "from shardwise.config.registry import BUILT_IN\n"
        "for task in BUILT_IN['shardwise.tasks']: load_task_class(task)\n"
        "heavy = ('monai', 'matplotlib', 'transformers', 'torch.distributed.optim')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
