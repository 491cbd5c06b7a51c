"""Running the program as a user does."""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from threading import Lock
from typing import IO, Protocol, Self

from tests.cli.server import Request, read_at_start
from tests.conftest import REPOSITORY

BIN = Path(sys.executable).parent
SHARDWISE = str(BIN / "shardwise")


class Program(Protocol):
    """A program that runs: a subprocess.Popen[str], or one that was forked."""

    pid: int
    stdout: IO[str] | None

    @property
    def returncode(self) -> int | None: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def communicate(self, *, timeout: float | None = None) -> tuple[str, str]: ...
    def send_signal(self, sig: int, /) -> None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


def environment(**more: str) -> dict[str, str]:
    """This environment, with this tree's code and the tests' tasks importable and the virtual environment's tools on the
    path."""
    path = f"{REPOSITORY / 'src'}:{REPOSITORY}"
    return {**os.environ, "PYTHONPATH": path, "PATH": f"{BIN}:{os.environ['PATH']}", "NO_COLOR": "1", **more}


def shardwise(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return run_program([SHARDWISE, *arguments], folder, **variables)


def run_program(command: list[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return _to_its_end(command, start(command, folder, environment(**variables)))


def run_anew(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`shardwise` by an interpreter of its own: where what is imported, how long that takes, or what it prints matters."""
    command = [SHARDWISE, *arguments]
    return _to_its_end(command, start(command, folder, environment(), anew=True))


def _to_its_end(command: list[str], program: Program) -> subprocess.CompletedProcess[str]:
    try:
        out, err = program.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        program.kill()
        program.communicate()
        raise
    assert program.returncode is not None
    return subprocess.CompletedProcess(command, program.returncode, out, err)


def started(command: list[str], folder: Path) -> Program:
    """The program in a process group of its own, as a terminal would start it; all it says on one stream."""
    return start(command, folder, environment(), stderr=subprocess.STDOUT, new_session=True)


def start(
    command: list[str],
    folder: Path,
    variables: dict[str, str],
    *,
    stdout: int = subprocess.PIPE,
    stderr: int = subprocess.PIPE,
    new_session: bool = False,
    anew: bool = False,
) -> Program:
    """Forked from a process that has imported everything, where that makes no difference but in time; `anew`: never."""
    server = _server() if sys.platform == "linux" and command[0] == SHARDWISE and not anew else None
    if server is None or read_at_start(variables) != server.read_at_start:
        return subprocess.Popen(
            command, cwd=folder, env=variables, stdout=stdout, stderr=stderr, text=True, start_new_session=new_session
        )
    return Forked(server, Request(command, str(folder), variables, new_session), stdout, stderr)


class Server:
    """It ends when this process does, or closes the socket."""

    def __init__(self) -> None:
        given = environment(OMP_NUM_THREADS="1")
        self.read_at_start = read_at_start(given)
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.cli.server", str(theirs.fileno())],
                cwd=REPOSITORY,
                env=given,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )

    def close(self) -> None:
        self.control.close()
        self.process.wait()


def _server() -> Server:
    """One for all tests of this process."""
    with _starting:
        return _first_server()


_starting = Lock()


@cache
def _first_server() -> Server:
    server = Server()
    atexit.register(server.close)
    return server


class Forked:
    """As much of subprocess.Popen[str] as tests use."""

    def __init__(self, server: Server, request: Request, stdout: int, stderr: int) -> None:
        self.args = request.command
        self.returncode: int | None = None
        self._ear, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.stdout, out = _stream(stdout)
        self.stderr, err = (None, os.dup(out)) if stderr == subprocess.STDOUT else _stream(stderr)
        with theirs:
            socket.send_fds(server.control, [request.encoded()], [0, out, err, theirs.fileno()])
        os.close(out)
        os.close(err)
        told = self._ear.recv(16)
        assert told, "the server that programs are forked from has ended"
        self.pid = int(told)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for stream in (self.stdout, self.stderr):
            if stream is not None:
                stream.close()
        self.wait()

    def poll(self) -> int | None:
        return self._look(0.0)

    def wait(self, timeout: float | None = None) -> int:
        if (code := self._look(timeout)) is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def communicate(self, *, timeout: float | None = None) -> tuple[str, str]:
        """Everything that it, and whatever it started, said."""
        end = None if timeout is None else time.monotonic() + timeout
        streams = [stream for stream in (self.stdout, self.stderr) if stream is not None]
        with ThreadPoolExecutor(2) as readers:
            reading = [readers.submit(stream.read) for stream in streams]
            try:
                texts = [each.result(None if end is None else max(0.0, end - time.monotonic())) for each in reading]
            except TimeoutError:
                self.kill()
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0) from None
        for stream in streams:
            stream.close()
        self.wait(None if end is None else max(0.0, end - time.monotonic()))
        return texts[0], texts[1] if len(texts) > 1 else ""

    def send_signal(self, sig: int, /) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _look(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            self._ear.settimeout(timeout)
            try:
                told = self._ear.recv(16)
            except (BlockingIOError, TimeoutError):
                return None
            assert told, "the server that programs are forked from has ended"
            self.returncode = int(told)
            self._ear.close()
        return self.returncode


def _stream(given: int) -> tuple[IO[str] | None, int]:
    """Our end of a pipe, if one is asked for, and the program's."""
    if given != subprocess.PIPE:
        return None, os.dup(given)
    reader, writer = os.pipe()
    return os.fdopen(reader), writer
