"""One training of a drill: its launcher, or one on each of two machines, what they say, and what its ranks write down."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from shardwise.drill.network import MEETING_POINT, Machine
from shardwise.watch.console import LOG_LEVEL

PATIENCE = 180.0
"""Seconds in which a run must come back from a fault, beyond the time after which a hang is noticed."""


@dataclass(frozen=True)
class DrillSpec:
    config: Mapping[str, Any]
    """Its values."""
    overrides: tuple[str, ...]
    ranks: int
    folder: Path
    hang_timeout: float


class Lost(Exception):
    """The run did not come back, or did not end well."""


class DrillRun:
    """In a folder of its own."""

    def __init__(self, spec: DrillSpec, folder: Path, machines: Sequence[Machine] = ()) -> None:
        """`machines`: two, among which the ranks are divided; none: all of them are here."""
        self.spec, self.folder, self.machines = spec, folder, machines
        folder.mkdir(parents=True)
        self.log = Log(folder, spec.ranks)
        self.launchers: list[_Launcher] = []

    def start(self) -> None:
        """Also again, where the launcher was killed."""
        if not self.launchers:
            self.launchers = [_Launcher(self.folder, number, *each) for number, each in enumerate(self._commands())]
        else:
            for launcher in self.launchers:
                launcher.start()

    def _commands(self) -> list[tuple[list[str], dict[str, Any]]]:
        given = {
            "config": dict(self.spec.config),
            "sys_path": sys.path,
            "overrides": [
                *self.spec.overrides,
                f"run_dir={self.folder / 'run'}",
                f"training.checkpoint_dir={self.folder / 'run' / 'checkpoints'}",  # never that of a real run
            ],
            "scratch": str(self.folder),
            "drill": os.getpid(),
            "ranks": self.spec.ranks,
            "of_ranks": self.spec.ranks,
        }
        if not self.machines:
            return [([], given)]
        there = self.spec.ranks // 2
        parts = self.spec.ranks - there, there
        meeting = {"machines": len(parts), "endpoint": MEETING_POINT}
        return [
            (machine.within(), {**given, "ranks": part, "meeting": meeting})
            for machine, part in zip(self.machines, parts, strict=True)
        ]

    def wait_for(self, condition: Callable[[], bool], seconds: float = PATIENCE) -> bool:
        """False: the run ended well before. If it ended otherwise, or nothing happens, the run is lost."""
        give_up = time.monotonic() + seconds
        while time.monotonic() < give_up:
            self.log.read()
            if condition():
                return True
            codes = [launcher.process.poll() for launcher in self.launchers]
            if all(code == 0 for code in codes):
                self.log.read()
                return condition()
            if failed := next((code for code in codes if code), None):
                raise Lost(f"the run ended with exit code {failed}: {self.last_words()}")
            time.sleep(0.02)
        raise Lost(f"nothing happened for {seconds:.0f} s: {self.last_words()}")

    def finish(self) -> None:
        if not self.launchers:
            self.start()
        try:
            self.wait_for(lambda: False, PATIENCE * 5)
        finally:
            self.end()

    def end(self) -> None:
        for launcher in self.launchers:
            launcher.end()

    def kill_launcher(self) -> None:
        (launcher,) = self.launchers
        launcher.process.send_signal(signal.SIGKILL)
        launcher.process.wait()

    def has_made(self, steps: int, since: float) -> bool:
        return self.steps_since(since) >= steps

    def steps_since(self, when: float) -> int:
        return sum(1 for record in self.log.of(0, "stepped") if record["time"] > when)

    def restarts_after(self, when: float) -> list[tuple[float, str | None]]:
        """When each launcher decided to start again, and the sentence in which it said why; the earliest first."""
        found = [each for launcher in self.launchers if (each := launcher.restart_after(when)) is not None]
        return sorted(found, key=lambda each: each[0])

    def output(self) -> str:
        return (self.folder / "output.txt").read_text(errors="replace")

    def last_words(self) -> str:
        return " / ".join(line for launcher in self.launchers for _, line in launcher.said[-4:]) or "without a word"


class _Launcher:
    def __init__(self, folder: Path, number: int, within: list[str], given: dict[str, Any]) -> None:
        self.folder = folder
        file = folder / f"launcher-{number}.yaml"  # a command line may be too short for a config
        file.write_text(yaml.safe_dump(given, sort_keys=False, allow_unicode=True))
        self.command = [*within, sys.executable, "-m", "shardwise.drill.launcher", str(file)]
        self.said: list[tuple[float, str]] = []
        self.process = self._started()

    def start(self) -> None:
        """Once more."""
        self.process = self._started()

    def _started(self) -> subprocess.Popen[str]:
        self.said.append((time.monotonic(), "restart of the launcher"))
        with (self.folder / "output.txt").open("a") as output:
            environ = {**os.environ, LOG_LEVEL: "info"}  # whatever the drill's own: what the run says is read
            process = subprocess.Popen(self.command, stdout=output, stderr=subprocess.PIPE, text=True, env=environ)
        threading.Thread(target=self._listen, args=(process,), daemon=True).start()
        return process

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        for line in process.stderr:
            self.said.append((time.monotonic(), line.rstrip()))

    def restart_after(self, when: float) -> tuple[float, str | None] | None:
        said = [(time, line) for time, line in self.said if time >= when]
        at = next((number for number, (_, line) in enumerate(said) if line.startswith("restart ")), None)
        return None if at is None else (said[at][0], said[at - 1][1] if at else None)

    def end(self) -> None:
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            self.process.wait()


class Log:
    """What the ranks wrote down, read as it grows."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.folder, self.records = folder, list[dict[str, Any]]()
        self._read = dict.fromkeys(range(ranks), 0)

    def read(self) -> None:
        for rank, start in self._read.items():
            file = self.folder / f"rank-{rank}.jsonl"
            if not file.exists():
                continue
            with file.open("rb") as stream:
                stream.seek(start)
                for line in stream:
                    if not line.endswith(b"\n"):
                        break  # not all of it is there yet
                    self._read[rank] += len(line)
                    with contextlib.suppress(json.JSONDecodeError):  # a line that a kill has cut
                        self.records.append(json.loads(line))

    def of(self, rank: int, what: str) -> list[dict[str, Any]]:
        return [record for record in self.records if record["rank"] == rank and record["what"] == what]

    def after(self, rank: int, what: str, when: float) -> dict[str, Any] | None:
        return next((record for record in self.of(rank, what) if record["time"] > when), None)

    def fired(self, number: int) -> dict[str, Any] | None:
        return next((each for each in self.records if each["what"] == "fired" and each["number"] == number), None)

    def last_step(self) -> int:
        steps = self.of(0, "stepped")
        return int(steps[-1]["step"]) if steps else 0
