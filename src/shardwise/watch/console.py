"""What a person sees while it runs: lines marked with their rank, and one live line of progress."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


class Console:
    """Rank 0 speaks; the other ranks write to a file of their own, unless all are asked to speak."""

    def __init__(self, rank: int, size: int, folder: Path, *, all_ranks: bool = False) -> None:
        self.prefix = f"[rank {rank}] " if size > 1 else ""
        self.speaks = rank == 0 or all_ranks
        self._live = False
        self._before = sys.stdout, sys.stderr
        self._log: IO[str] | None = None
        self._handler = _Spoken(self)
        logger = logging.getLogger("shardwise")
        logger.setLevel(logging.INFO)
        logger.propagate = False
        logger.addHandler(self._handler)
        if self.speaks:
            self.terminal = sys.stdout
            if self.prefix:
                sys.stdout = _Prefixed(sys.stdout, self.prefix)
                sys.stderr = _Prefixed(sys.stderr, self.prefix)
        else:
            (folder / "ranks").mkdir(parents=True, exist_ok=True)
            self._log = (folder / "ranks" / f"rank-{rank:04d}.log").open("a")
            self.terminal = self._log
            sys.stdout = sys.stderr = _Prefixed(self._log, self.prefix)

    def say(self, text: str = "") -> None:
        """A line that stays."""
        if self.speaks:
            with _whatever_becomes_of_it():
                self._clear()
                for line in text.split("\n"):
                    self.terminal.write(f"{self.prefix}{line}\n".rstrip(" "))
                self.terminal.flush()

    def show(self, text: str) -> None:
        """The live line: replaced by the next one. On a terminal only."""
        if self.speaks and self.terminal.isatty():
            with _whatever_becomes_of_it():
                self._clear()
                self.terminal.write(f"{self.prefix}{text}")
                self.terminal.flush()
                self._live = True

    def close(self) -> None:
        self._clear()
        logger = logging.getLogger("shardwise")
        logger.removeHandler(self._handler)
        logger.propagate = True
        sys.stdout, sys.stderr = self._before
        if self._log is not None:
            self._log.close()

    def _clear(self) -> None:
        if self._live:
            self.terminal.write("\r\x1b[K")
            self._live = False


@contextmanager
def _whatever_becomes_of_it() -> Iterator[None]:
    """A terminal that is gone, or a log file on a full disk, must not end a training; a reader that has left may."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError:
        pass


class _Spoken(logging.Handler):
    """What data and tasks have to say: they log, and a run's console speaks it."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console

    def emit(self, record: logging.LogRecord) -> None:
        mark = "warning: " if record.levelno >= logging.WARNING else ""
        self.console.say(mark + record.getMessage())


class _Prefixed:
    """A text stream that begins every line with the rank."""

    def __init__(self, stream: Any, prefix: str) -> None:
        self._stream, self._prefix, self._at_start = stream, prefix, True

    def write(self, text: str) -> int:
        for line in text.splitlines(keepends=True):
            self._stream.write((self._prefix if self._at_start else "") + line)
            self._at_start = line.endswith("\n")
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
