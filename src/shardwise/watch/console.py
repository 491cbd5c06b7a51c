"""What a person sees: the records of the logger `shardwise` as lines, and one live line of progress.

Library code logs, each module with `logging.getLogger(__name__)`, and never prints. The program writes the records to stderr
(`program_logging`). In a training, each rank's Console takes over: rank 0 speaks on stdout, the others write to a file.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from shardwise.errors import ConfigError

LOG_LEVEL = "SHARDWISE_LOG_LEVEL"
"""The environment variable that carries --log-level to the ranks, and to other processes that the program starts."""
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
PLAIN = {"plain": True}
"""log.warning(text, extra=PLAIN): a line without "warning: " before it."""

log = logging.getLogger(__name__)
_shardwise = logging.getLogger("shardwise")


@contextmanager
def program_logging(prefix: str = "") -> Iterator[None]:
    """Within it, what is logged goes to stderr, each line after `prefix`."""
    before = os.environ.get(LOG_LEVEL)
    with _taking_over(_Lines(prefix, _to_stderr)):
        try:
            yield
        finally:
            os.environ.pop(LOG_LEVEL, None)
            if before is not None:
                os.environ[LOG_LEVEL] = before


def set_log_level(name: str) -> None:
    """One of LEVELS, for this process and those that it starts from now on."""
    os.environ[LOG_LEVEL] = name
    follow_log_level()


def follow_log_level() -> None:
    """The level that the environment says; where it says none, one that the user's own code has set, or info."""
    name = os.environ.get(LOG_LEVEL)
    if name is not None and name not in LEVELS:
        raise ConfigError(f"{LOG_LEVEL}={name}: must be one of {', '.join(LEVELS)}")
    if name is not None or _shardwise.level == logging.NOTSET:
        _shardwise.setLevel(LEVELS[name or "info"])


class Console:
    """Rank 0 speaks; the other ranks write to a file of their own, unless all are asked to speak."""

    def __init__(self, rank: int, size: int, folder: Path, *, all_ranks: bool = False) -> None:
        self.prefix = f"[rank {rank}] " if size > 1 else ""
        self.speaks = rank == 0 or all_ranks
        self._live = False
        self._before = sys.stdout, sys.stderr
        self._log: IO[str] | None = None
        self._logging = ExitStack()
        self._logging.enter_context(_taking_over(_Lines(self.prefix, self._write)))
        follow_log_level()
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

    def say(self, text: str = "", level: int = logging.INFO) -> None:
        """A line that stays, of the run and not of this rank alone."""
        if self.speaks:
            log.log(level, text)

    def warn(self, text: str) -> None:
        self.say(text, logging.WARNING)

    def show(self, text: str) -> None:
        """The live line: replaced by the next one. On a terminal only."""
        if self.speaks and self.terminal.isatty() and log.isEnabledFor(logging.INFO):
            with _whatever_becomes_of_it():
                self._clear()
                self.terminal.write(f"{self.prefix}{text}")
                self.terminal.flush()
                self._live = True

    def close(self) -> None:
        self._clear()
        self._logging.close()
        sys.stdout, sys.stderr = self._before
        if self._log is not None:
            self._log.close()

    def _write(self, lines: str) -> None:
        with _whatever_becomes_of_it():
            self._clear()
            self.terminal.write(f"{lines}\n")
            self.terminal.flush()

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


def _to_stderr(lines: str) -> None:
    with suppress(OSError, ValueError):  # the terminal may be gone, which may be why there is something to say
        sys.stderr.write(f"{lines}\n")
        sys.stderr.flush()


class _Lines(logging.Handler):
    """Records as the lines that a person reads."""

    def __init__(self, prefix: str, write: Callable[[str], None]) -> None:
        super().__init__()
        self._prefix, self._write = prefix, write

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
        except Exception:  # words that do not fit their arguments: whoever logs them goes on
            self.handleError(record)
            return
        plain = record.levelno == logging.INFO or getattr(record, "plain", False)
        marked = text if plain else f"{record.levelname.lower()}: {text}"
        self._write("\n".join(f"{self._prefix}{line}" for line in marked.split("\n")))


@contextmanager
def _taking_over(handler: _Lines) -> Iterator[None]:
    """Of our own handlers, only this one hears what is logged. A user's still do."""
    ours = [other for other in _shardwise.handlers if isinstance(other, _Lines)]
    level, propagate = _shardwise.level, _shardwise.propagate
    for other in ours:
        _shardwise.removeHandler(other)
    _shardwise.addHandler(handler)
    _shardwise.propagate = False  # libraries give the root logger handlers, and all would be said twice
    try:
        yield
    finally:
        _shardwise.removeHandler(handler)
        for other in ours:
            _shardwise.addHandler(other)
        _shardwise.setLevel(level)
        _shardwise.propagate = propagate


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
