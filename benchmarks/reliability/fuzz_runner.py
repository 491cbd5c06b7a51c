"""Runs mutations in a warm process of its own, which is ended when one takes too long, and cannot take more memory than given."""

from __future__ import annotations

import json
import os
import resource
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
SECONDS = 2.0
MEMORY = 500 * 10**6
"""Bytes above what the warm process has."""
START = 300.0
_SERVE = "import sys, pathlib; from benchmarks.reliability.fuzz_runner import serve; serve(pathlib.Path(sys.argv[1]))"


@dataclass(frozen=True)
class Result:
    kind: str
    seed: int
    what: str
    """`refused`, `right`, or what is wrong."""
    seconds: float
    """By the clock, without those in which other processes had the processor."""
    processor: float = 0.0
    """Of processor time."""
    memory: int = 0
    """The most that the process has ever held, in bytes above its start."""
    said: str = ""
    done: str = ""

    @property
    def is_right(self) -> bool:
        return self.what in ("refused", "right") and self.seconds <= SECONDS and self.memory <= MEMORY


class WarmProcess:
    def __init__(self, folder: Path, patience: float) -> None:
        """`patience`: seconds by the clock after which a mutation is one that hangs."""
        self.folder, self.patience = folder, patience
        self._process: subprocess.Popen[str] | None = None

    def results(self, cases: Iterable[tuple[str, int]]) -> Iterator[Result]:
        try:
            for kind, seed in cases:
                yield self._result(kind, seed)
        finally:
            self._end()

    def _result(self, kind: str, seed: int) -> Result:
        if self._process is None:
            self._process = self._started()
        answer = self._asked(self._process, json.dumps([kind, seed]), self.patience)
        if answer is None:
            code = self._process.poll()
            self._end()
            what = f"no answer in {self.patience:g} s" if code is None else f"the process ended with {code}"
            return Result(kind, seed, what, self.patience)
        return Result(kind, seed, **json.loads(answer))

    def _started(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", _SERVE, str(self.folder)],
            cwd=REPOSITORY, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        if self._asked(process, None, START) is None:
            process.kill()
            process.wait()
            raise RuntimeError("the process that is to be asked did not start")
        return process

    @staticmethod
    def _asked(process: subprocess.Popen[str], question: str | None, patience: float) -> str | None:
        """A line back; None: there is none. Nothing more than a line is ever under way."""
        assert process.stdin is not None and process.stdout is not None
        try:
            if question is not None:
                process.stdin.write(f"{question}\n")
                process.stdin.flush()
            ready, _, _ = select.select([process.stdout], [], [], patience)
            return (process.stdout.readline() or None) if ready else None
        except BrokenPipeError:
            return None

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def cases(kinds: Iterable[str], seed: int, number: int) -> Iterator[tuple[str, int]]:
    """So many mutations, the kinds in turn."""
    every = list(kinds)
    for count in range(number):
        yield every[count % len(every)], seed + count // len(every)


# ---------------------------------------------------------------- the warm process


def serve(folder: Path) -> None:
    """Reads a kind and a seed a line, and writes an answer a line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what is printed past Python must not be taken for an answer
    from benchmarks.reliability.fuzz_cases import KINDS, answer, write_originals

    originals = folder / "originals"
    shutil.rmtree(folder / "scratch", ignore_errors=True)  # of a process that was ended
    if not originals.exists():
        originals.mkdir(parents=True)
        write_originals(originals)
    for seed, kind in enumerate(KINDS):  # so that everything is imported
        answer(kind, -1 - seed, originals, folder / "scratch")
    before = _held("VmHWM")
    most = _held("VmData") + MEMORY
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        kind, seed = json.loads(line)
        began = time.perf_counter() - _kept_waiting(), time.process_time()
        found = answer(kind, seed, originals, folder / "scratch")
        about: dict[str, Any] = {**asdict(found), "kind": kind, "seed": seed}
        about["seconds"] = time.perf_counter() - _kept_waiting() - began[0]
        about |= {"processor": time.process_time() - began[1], "memory": _held("VmHWM") - before}
        print(
            json.dumps({key: about[key] for key in ("what", "said", "done", "seconds", "processor", "memory")}),
            file=answers,
            flush=True,
        )


def _kept_waiting() -> float:
    """Seconds in which this process could have run, and another one did."""
    return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9


def _held(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
