"""Running the program as a user does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import REPOSITORY

BIN = Path(sys.executable).parent
SHARDWISE = str(BIN / "shardwise")


def environment(**more: str) -> dict[str, str]:
    """This environment, with this tree's code and the tests' tasks importable and the virtual environment's tools on the
    path."""
    path = f"{REPOSITORY / 'src'}:{REPOSITORY}"
    return {**os.environ, "PYTHONPATH": path, "PATH": f"{BIN}:{os.environ['PATH']}", "NO_COLOR": "1", **more}


def run_program(command: list[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, env=environment(**variables), capture_output=True, text=True, timeout=240, check=False
    )


def shardwise(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return run_program([SHARDWISE, *arguments], folder, **variables)


def started(command: list[str], folder: Path) -> subprocess.Popen[str]:
    """The program in a process group of its own, as a terminal would start it; all it says on one stream."""
    return subprocess.Popen(
        command,
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
