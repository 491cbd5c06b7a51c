"""Every script under benchmarks/ still runs: no figure that was published outlives the script that made it."""

from __future__ import annotations

import ast
import itertools
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from tests.cli.program import environment
from tests.conftest import REPOSITORY, clean_environment

FOLDER = REPOSITORY / "benchmarks"
AS_MODULES = FOLDER / "gpu"
"""Scripts below it import each other, and are started by `python -m`."""
TOO_LONG = 300
"""Seconds for each: it takes about ten on a machine that has nothing else to do."""
BECOME = {"benchmarks/gpu/foundation.py": "benchmarks/gpu/contenders"}
"""Scripts that dated pages name, and what took their place, which those pages say."""


def scripts() -> list[Path]:
    """The files that are started, not imported: those that ask whether they are the main one."""
    return [file for file in sorted(FOLDER.rglob("*.py")) if _is_started(file)]


def _is_started(file: Path) -> bool:
    """Loops of their own that `verify` is tried on are its data, whose script is cases/matrix.py."""
    if file.name.startswith("loop_"):
        return False
    tests = [node.test for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.If)]
    return any(ast.unparse(test) == "__name__ == '__main__'" for test in tests)


def command(script: Path) -> list[str]:
    if not script.is_relative_to(AS_MODULES):
        return [sys.executable, str(script)]
    parts = script.relative_to(REPOSITORY).with_suffix("").parts
    return [sys.executable, "-m", ".".join(part for part in parts if part != "__main__")]


def named(script: Path) -> str:
    return str(script.relative_to(FOLDER))


Outcomes = dict[Path, Future[subprocess.CompletedProcess[str]]]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Of the scripts that are asked for. They ran side by side: most of their time goes into imports."""
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(max(2, (os.cpu_count() or 1) // 2)) as pool:
        clean_environment(patch)
        patch.setenv("OMP_NUM_THREADS", "1")
        items = [item for item in request.session.items if "outcomes" in getattr(item, "fixturenames", ())]
        asked: list[Path] = [item.callspec.params["script"] for item in items]  # type: ignore[attr-defined]
        return {script: pool.submit(run, script, tmp_path_factory.mktemp(script.stem)) for script in asked}


def run(script: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """In a process group of its own, which ends with it: a script that hangs leaves no ranks behind."""
    variables = environment(SHARDWISE_CACHE=str(folder), TMPDIR=str(folder))
    words = [*command(script), "--tiny"]
    program = subprocess.Popen(
        words,
        cwd=REPOSITORY,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = program.communicate(timeout=TOO_LONG)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
        program.wait()
    return subprocess.CompletedProcess(words, program.returncode, out, err)


@pytest.mark.timeout(5 * TOO_LONG)
@pytest.mark.parametrize("script", scripts(), ids=named)
def test_the_script_runs_and_publishes_figures(script: Path, outcomes: Outcomes) -> None:
    done = outcomes[script].result()
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    published = rows(done.stdout) or sentences(done.stdout)
    assert published, f"neither a table nor a sentence has a figure in it:\n{done.stdout}"
    assert not re.search(r"\bnan\b|cannot be made", done.stdout), done.stdout
    wrong = [line for line in done.stdout.splitlines() if "failed: " in line]
    assert not wrong, wrong


def rows(said: str) -> list[str]:
    """Rows of tables in markdown that have figures. A head, which has a line of dashes below it, is none."""
    lines = said.splitlines()
    heads = {line for line, below in itertools.pairwise(lines) if re.fullmatch(r"\|(-+\|)+", below)}
    return [line for line in lines if line.startswith("|") and line not in heads and re.search(r"\d", line)]


def sentences(said: str) -> list[str]:
    return [line for line in said.splitlines() if re.search(r"\d(\.\d+)? (µs|ms|s|MB|GiB)\b", line)]


def test_the_scripts_are_found() -> None:
    """Otherwise none would be run, and all would pass."""
    found = {named(script) for script in scripts()}
    assert {"gpu/start.py", "gpu/contenders/__main__.py", "strategies/overhead.py", "verify/cases/matrix.py"} <= found


def test_every_script_that_a_published_page_names_is_there() -> None:
    for page in FOLDER.rglob("*.md"):
        for name in re.findall(r"benchmarks/[\w/]+\.py", page.read_text()):
            assert (REPOSITORY / BECOME.get(name, name)).exists(), f"{page.name} names {name}"


def test_a_tool_that_is_not_installed_has_a_row_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.gpu.contenders import turns
    from benchmarks.gpu.contenders.meter import Meter, Plan
    from benchmarks.gpu.contenders.problem import Contender
    from benchmarks.gpu.contenders.table import line

    def run(meter: Meter) -> None:
        pytest.fail("it is not installed")

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    row = turns.take_turn(Contender("Lightning, use_checkpoint", run, 2, Plan(1, 1, 1)))
    assert line(row) == "| Lightning, use_checkpoint | 2 | not installed: lightning | | | | | | |"
    row = turns.take_turn(Contender("Transformers Trainer", run, 2, Plan(1, 1, 1)))
    assert row.failed == "not installed: transformers, accelerate"
