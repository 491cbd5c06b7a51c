"""A program that is forked is to a test what one started anew is: otherwise tests of the program would be of another."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.program import Forked, Program, _server, environment, run_anew, shardwise
from tests.cli.server import Request

ABOUT_ITSELF = """
import atexit, json, multiprocessing.process, os, random, signal, sys, threading

def about():
    yield "arguments", sys.argv
    yield "folder", [os.getcwd(), multiprocessing.process.ORIGINAL_DIR]
    yield "environment", {name: value for name, value in os.environ.items() if name != "_"}
    yield "imports", sys.path[0]
    yield "main", [__name__, __file__, sys.modules["__main__"].__file__, __spec__ is None]
    yield "session", os.getsid(0) == os.getpid()
    yield "handlers", {int(number): str(signal.getsignal(number)) for number in signal.valid_signals()}
    yield "blocked", sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    yield "threads", threading.active_count()
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        yield stream.fileno(), [stream.encoding, stream.errors, stream.line_buffering, stream.write_through,
                                stream.isatty(), stream.mode, stream.newlines]

print(json.dumps(dict(about())))
print("unread", end="")
print(f"{random.random()}", file=sys.stderr)
atexit.register(print, ", said at the end", flush=True)
if sys.argv[1] == "exit":
    sys.exit(7)
if sys.argv[1] == "wait":
    print(flush=True)
    signal.pause()
raise ValueError("nobody catches this")
"""


def begun(folder: Path, how: str, argument: str, new_session: bool = False) -> Program:
    """The script, forked or started anew, in a folder of its own."""
    script = folder / "about.py"
    script.write_text(ABOUT_ITSELF)
    command, given = [str(script), argument], environment(COLOUR="blue")
    if how == "forked":
        request = Request(command, str(folder), given, new_session)
        return Forked(_server(), request, subprocess.PIPE, subprocess.PIPE)
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=folder,
        env=given,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=new_session,
    )


def what_it_said(program: Program) -> tuple[dict[str, Any], str, str, int | None]:
    out, err = program.communicate(timeout=60)
    first, _, rest = out.partition("\n")
    return json.loads(first), rest, err, program.returncode


@pytest.mark.parametrize("new_session", [False, True])
def test_what_a_program_finds_when_it_starts_is_the_same(tmp_path: Path, new_session: bool) -> None:
    forked, anew = (what_it_said(begun(tmp_path, how, "exit", new_session)) for how in ("forked", "anew"))
    assert forked[0] == anew[0]
    assert forked[0]["session"] == new_session and forked[0]["environment"]["COLOUR"] == "blue"
    assert (forked[1], forked[3]) == (anew[1], anew[3]) == ("unread, said at the end\n", 7)


def test_chance_is_its_own(tmp_path: Path) -> None:
    assert len({what_it_said(begun(tmp_path, "forked", "exit"))[2] for _ in range(3)}) == 3


@pytest.mark.parametrize("how", ["forked", "anew"])
def test_an_error_that_nobody_catches_ends_it_with_a_traceback(tmp_path: Path, how: str) -> None:
    _, rest, err, code = what_it_said(begun(tmp_path, how, "raise"))
    assert code == 1 and rest == "unread, said at the end\n"
    assert err.count("Traceback") == 1 and err.endswith("ValueError: nobody catches this\n")


@pytest.mark.parametrize("how", ["forked", "anew"])
def test_signals_reach_it_and_its_end_is_known(tmp_path: Path, how: str) -> None:
    ended = {}
    for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGINT):
        program = begun(tmp_path, how, "wait")
        assert program.stdout is not None
        program.stdout.readline()
        program.stdout.readline()
        assert program.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            program.wait(timeout=0.01)
        program.send_signal(number)
        assert program.wait(timeout=30) == program.poll() == program.returncode
        ended[number] = program.returncode
        program.communicate()
        with pytest.raises(ProcessLookupError):
            os.kill(program.pid, 0)
    assert ended == {signal.SIGTERM: -15, signal.SIGKILL: -9, signal.SIGINT: -2}


def test_a_training_says_the_same_on_both_ways(tmp_path: Path) -> None:
    (tmp_path / "toy.yaml").write_text("task: tests.tasks:Ragged\ntraining: {max_steps: 3, log_every_n_steps: 1}\n")
    said = [each(tmp_path, "train", "toy.yaml", "--fresh") for each in (shardwise, run_anew)]
    assert [done.returncode for done in said] == [0, 0], said
    forked, anew = (_without_times(done.stdout) for done in said)
    assert forked == anew and any("next:" in line for line in forked)
    assert said[0].stderr == said[1].stderr


def _without_times(said: str) -> list[str]:
    """Nor what is only said where something took long, or where there was a run before."""
    lines = [line for line in said.splitlines() if "warning:" not in line and "moved" not in line]
    return [" ".join(word for word in line.split() if not any(letter.isdigit() for letter in word)) for line in lines]
