"""The process that programs under test are forked from: it has imported what they import, so that none waits for it again.

`python -m tests.cli.server SOCKET`, started by tests/cli/program.py. What is forked from here is to a test what a program
started anew would be: a process with its own streams, folder, environment, arguments and signals, which runs the script
that it was asked to run, as __main__, and ends as any program ends. Two things it shares with its siblings: how strings are
hashed, and what importing a module has printed.
"""

from __future__ import annotations

import _posixsubprocess
import contextlib
import gc
import importlib
import io
import json
import multiprocessing.process
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence, Set
from dataclasses import asdict, dataclass
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

PRELOAD = (
    "torch._dynamo",
    "torch.distributed.run",
    "shardwise.engine.fit",
    "shardwise.launch.external_ranks",
    "shardwise.launch.local",
    "shardwise.drill.conduct",
    "shardwise.drill.inject",
    "shardwise.verify.coverage",
    "shardwise.verify.probe",
    "shardwise.verify.proof",
    "shardwise.verify.rank",
    "shardwise.tasks.cells",
    "shardwise.tasks.chess",
    "shardwise.tasks.images",
    "shardwise.tasks.segmentation",
    "monai.networks.nets",
    "transformers.models.llama.modeling_llama",
)
"""Not shardwise.launch.preload and freeze_gc: a launcher's server of ranks does its work when it imports them."""
READ_AT_START = (
    "CUDA",
    "HF_",
    "LANG",
    "LC_",
    "LD_",
    "MKL_",
    "MONAI",
    "OMP_",
    "OPENBLAS",
    "PYTHON",
    "TORCH",
    "TRANSFORMERS",
)
"""Variables that Python or a library looks at once, when it starts: a program with others than the server's is started anew."""
RUN_BY_THE_KERNEL = "jemalloc_bg_thd"
"""A thread of Arrow's allocator, which sees to it that a fork has one too."""


@dataclass(frozen=True)
class Request:
    """Beside it travel its streams, and a socket that is told its number, and its exit code when it has ended."""

    command: list[str]
    """A Python script, and its arguments."""
    folder: str
    environment: dict[str, str]
    new_session: bool

    def encoded(self) -> bytes:
        return json.dumps(asdict(self)).encode()


def read_at_start(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(READ_AT_START)}


def main(control: socket.socket) -> None:
    for name in [*PRELOAD, *(f"shardwise.cli.{file.stem}" for file in _verbs())]:
        importlib.import_module(name)
    threads = {Path(task, "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()}
    threads -= {Path("/proc/self/comm").read_text().strip(), RUN_BY_THE_KERNEL}
    assert not threads, f"a fork would be without these threads: {threads}"
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest, which then closes the socket
    if (command := serve(control)) is not None:
        runpy.run_path(command[0], run_name="__main__")


def _verbs() -> list[Path]:
    return list(Path(importlib.import_module("shardwise.cli").__path__[0]).glob("[a-z]*.py"))


def serve(control: socket.socket) -> list[str] | None:
    """Fork a process for every request. Returns in each of them, with its command, and at the end in the server, with None."""
    told: dict[int, tuple[int, socket.socket]] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd != control.fileno():
                    pid, ear = told.pop(key.fd)
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    _, status = os.waitpid(pid, 0)
                    with contextlib.suppress(BrokenPipeError):
                        ear.send(str(os.waitstatus_to_exitcode(status)).encode())
                    ear.close()
                    continue
                text, fds, _, _ = socket.recv_fds(control, 2**22, 4)
                if not text:
                    return None
                request = Request(**json.loads(text))
                ear = socket.socket(fileno=fds.pop())
                if pid := os.fork():
                    for fd in fds:
                        os.close(fd)
                    ear.send(str(pid).encode())
                    number = os.pidfd_open(pid)
                    told[number] = pid, ear
                    selector.register(number, selectors.EVENT_READ)
                    continue
                control.close()
                ear.close()
                for number, (_, other) in told.items():
                    os.close(number)
                    other.close()
                become(request, fds)
                return request.command


def become(request: Request, streams: Sequence[int]) -> None:
    """What starting anew would have made of this process."""
    if request.new_session:
        os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        setattr(sys, name, _reopened(number, getattr(sys, name)))
    os.chdir(request.folder)
    multiprocessing.process.ORIGINAL_DIR = request.folder  # type: ignore[attr-defined]
    os.environ.clear()
    os.environ.update(request.environment)
    sys.argv = list(request.command)
    sys.path[0] = str(Path(request.command[0]).parent)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.modules["numpy"].random.seed()
    subprocess._fork_exec = _posixsubprocess.fork_exec = forked_too(_posixsubprocess.fork_exec)  # type: ignore[attr-defined]


def _reopened(number: int, stream: Any) -> TextIO:
    """As Python opens it when it starts: by the line on a terminal, and for errors everywhere."""
    mode = "w" if number else "r"
    unbuffered = stream.write_through and number > 0
    buffer = open(number, f"{mode}b", 0 if unbuffered else -1, closefd=False)  # noqa: SIM115
    line = not unbuffered and (number == 2 or os.isatty(number))
    opened: Any = io.TextIOWrapper(
        buffer, stream.encoding, stream.errors, "\n" if number else None, line, stream.write_through
    )
    opened.mode = mode
    return opened


# ---------------------------------------------------------------- what a program starts in turn

FORKED_TOO = ("from multiprocessing.forkserver import main", "shardwise.drill.launcher")
"""A launcher's server, from which it forks its ranks, and the launchers of a drill: by what Python is asked to run."""


def forked_too(fork_exec: Callable[..., int]) -> Callable[..., int]:
    """In place of that of subprocess and multiprocessing (Python 3.11 to 3.14): where it would start a Python that imports
    what is imported here already, it forks this one."""

    def fork(arguments: Sequence[Any], paths: Any, close: bool, kept: Sequence[int], folder: Any, environment: Any,
             *fds_and_more: Any) -> int:  # fmt: skip
        words = [os.fsdecode(word) for word in arguments]
        flag = next((place for place, word in enumerate(words) if word in ("-c", "-m")), 0)
        plain = folder is None and environment is None and close and not Path("/dev/nvidiactl").exists()
        if not (plain and words[0] == sys.executable and flag and words[flag + 1].startswith(FORKED_TOO)):
            return fork_exec(arguments, paths, close, kept, folder, environment, *fds_and_more)
        stdin, _, _, stdout, _, stderr, _, says_that_it_failed = fds_and_more[:8]
        sys.stdout.flush()
        if pid := os.fork():
            return pid
        code: Any = 1
        try:
            _forget_the_program(set(kept) - {says_that_it_failed}, (stdin, stdout, stderr))
            sys.argv = words[flag + (words[flag] == "-m") :]
            if words[flag] == "-m":
                runpy.run_module(words[flag + 1], run_name="__main__", alter_sys=True)
            else:
                sys.modules["__main__"] = anew = ModuleType("__main__")
                exec(words[flag + 1], anew.__dict__)
            code = 0
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            traceback.print_exc()
        finally:  # not back into the code that it was forked from
            sys.stdout.flush()
            os._exit(code)

    return fork


def _forget_the_program(kept: Set[int], streams: Sequence[int]) -> None:
    """What a program has opened, and what it does on signals, is not for those it starts: a new one would have none of it."""
    signal.set_wakeup_fd(-1)
    for caught in filter(lambda each: callable(signal.getsignal(each)), signal.valid_signals()):
        signal.signal(caught, signal.default_int_handler if caught == signal.SIGINT else signal.SIG_DFL)
    for number, (stream, name) in enumerate(zip(streams, ("stdin", "stdout", "stderr"), strict=True)):
        if stream != -1:
            os.dup2(stream, number)
        setattr(sys, name, _reopened(number, getattr(sys, name)))
    # Replaced and not closed: libraries that are still in memory close their numbers in each fork, whoever has them then (libuv,
    # which TCPStore uses, its pipe).
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    for number in [int(each.name) for each in Path("/proc/self/fd").iterdir()]:
        if number > 2 and number not in {*kept, nothing}:
            with contextlib.suppress(OSError):  # the one by which they were listed
                os.dup2(nothing, number, inheritable=False)
    for known in (forkserver._forkserver, resource_tracker._resource_tracker):
        type(known).__init__(known)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
