"""One rank that the launcher started: its signs of life, its place in the code on request, its error written down."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from shardwise.compat.quiet import quiet_pytorch
from shardwise.errors import LaunchError, ShardwiseError
from shardwise.launch.environment import ATTEMPT
from shardwise.launch.scratch import no_room_for_temporary_files
from shardwise.launch.server import die_with, unblock_stop_signals
from shardwise.watch.console import follow_log_level
from shardwise.watch.failures import record_failure, reserve_room
from shardwise.watch.heartbeats import Phase, beat, begin_heartbeats, end_heartbeats
from shardwise.watch.watchdog import stack_file

log = logging.getLogger(__name__)


def rank_main(entry: Callable[..., int], args: tuple[Any, ...], beats: str, attempt: int) -> int:
    """Called by the agent, in the rank's process. Returns its exit code."""
    preload = sys.modules.get(
        "shardwise.launch.preload"
    )  # not there in an interpreter that was not forked from the server
    die_with(preload.server if preload is not None else os.getppid())
    unblock_stop_signals()
    os.environ[ATTEMPT] = str(attempt)
    follow_log_level()
    quiet_pytorch()
    rank = int(os.environ["RANK"])
    with watched(Path(beats), rank, int(os.environ["WORLD_SIZE"])):
        try:
            return entry(*args)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):  # asked twice
                os._exit(128 + signal.SIGINT)
            if isinstance(error, SystemExit):
                error = LaunchError(f"rank {rank}: the task called sys.exit({error.code}) during the run")
            _write_down(error, Path(beats), rank)
            sys.stdout.flush()
            for worker in multiprocessing.active_children():
                worker.kill()
            # Not by raising: what hangs in a group of ranks, or in a loader worker, must not keep a rank that has failed.
            os._exit(1)


def _write_down(error: BaseException, beats: Path, rank: int) -> None:
    try:
        record_failure(error, beats, rank)
    except OSError:  # the temporary folder is full, or gone
        said = str(error) if isinstance(error, ShardwiseError) else "".join(traceback.format_exception(error))
        log.error(f"rank {rank}: {said}")


@contextmanager
def watched(beats: Path, rank: int, world: int) -> Iterator[None]:
    """This process can be looked at from outside: what it does, and by SIGUSR2 where in the code it is."""
    with ExitStack() as files:
        try:
            stack = files.enter_context(stack_file(beats, rank).open("w"))
            reserve_room(beats, rank)
            begin_heartbeats(beats, rank, world)
        except OSError as error:
            log.warning(
                f"rank {rank} runs without being watched, so a hang is not noticed: {no_room_for_temporary_files(error)}"
            )
            yield
            return
        faulthandler.register(signal.SIGUSR2, file=stack, all_threads=True, chain=False)
        faulthandler.enable(file=stack)  # a crash leaves its place too
        try:
            yield
        finally:
            beat(Phase.END)
            end_heartbeats()
            faulthandler.unregister(signal.SIGUSR2)
            faulthandler.disable()
            with contextlib.suppress(ValueError):
                signal.signal(signal.SIGUSR2, signal.SIG_IGN)
