"""A pool of processes that stay alive and are sent work: starting ranks anew for every test would take an hour."""

from __future__ import annotations

import gc
import itertools
import multiprocessing as mp
import multiprocessing.connection
import os
import signal
import socket
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest

from shardwise.launch.server import unblock_stop_signals

PRELOAD = [
    "tests.distributed.work",
    "shardwise.tasks.chess.task",
    "shardwise.tasks.cells.task",
    "shardwise.tasks.images.task",
    "transformers.models.llama.modeling_llama",  # and all that models of Transformers import
    "shardwise.launch.preload",
    "shardwise.verify.rank",
    "shardwise.launch.freeze_gc",
]
LAST_WORDS = 3.0
"""Seconds that ranks have for their own errors when another has told one."""


class RankPool:
    key = pytest.StashKey["RankPool"]()

    def __init__(self, size: int) -> None:
        self._workers = [_started() for _ in range(size)]

    def pids(self) -> set[int]:
        return {process.pid for process, _ in self._workers}

    def run(self, size: int, function: Callable[..., Any], *args: Any, timeout: float = 120) -> list[Any]:
        """`function(*args)` on `size` ranks at once, each with torchrun's variables set. An error of any is raised here."""
        try:
            return self._run(size, function, args, timeout)
        except RankDied as error:
            if not error.of_gloo:
                raise
            warnings.warn(f"{error}: the ranks are started anew, and run it again", stacklevel=2)
        return self._run(size, function, args, timeout)

    def _replace(self, size: int) -> None:
        """One has died, and the others wait for it: later tests get ranks of their own."""
        for number, (process, pipe) in enumerate(self._workers[:size]):
            pipe.close()
            process.kill()
            process.join()
            self._workers[number] = _started()

    def _run(self, size: int, function: Callable[..., Any], args: Any, timeout: float) -> list[Any]:
        port = _free_port()
        for rank, (_, pipe) in enumerate(self._workers[:size]):
            pipe.send((function, args, rank, size, port))
        results: list[Any] = []
        problems: list[str] = []
        for rank, (process, pipe) in enumerate(self._workers[:size]):
            if not pipe.poll(timeout):
                raise TimeoutError(f"rank {rank} of {size} did not answer within {timeout} s")
            try:
                good, value = pipe.recv()
            except EOFError:
                died = RankDied(rank, process)
                self._replace(size)
                raise died from None
            results.append(value)
            if not good:
                problems.append(f"rank {rank}: {value}")
        if problems:
            raise RankFailure("\n".join(problems))
        return results

    def close(self) -> None:
        for process, pipe in self._workers:
            pipe.close()
            process.join(timeout=10)
            if process.is_alive():
                process.kill()


class FreshRanks:
    """New processes for every job, forked from one that has imported everything. For what leaves its traces in a process:
    torch 2.13 keeps device meshes, and hangs on those of an earlier process group; and for ranks that may fail alone."""

    def run(self, size: int, function: Callable[..., Any], *args: Any, timeout: float = 120) -> list[Any]:
        port = _free_port()
        workers = []
        for rank in range(size):
            process, pipe = _started()
            pipe.send((function, args, rank, size, port))
            workers.append((process, pipe))
        try:
            return self._results(workers, timeout)
        finally:
            for process, pipe in workers:
                pipe.close()
                process.join(timeout=10)
                if process.is_alive():
                    process.kill()
                    process.join()

    def _results(self, workers: list[tuple[Any, Connection]], timeout: float) -> list[Any]:
        """In the order of ranks. After the first error the others have a moment to tell theirs: they may wait for ever, or be the
        reason for it."""
        results: dict[int, Any] = {}
        problems: list[str] = []
        waiting: dict[Any, int] = {pipe: rank for rank, (_, pipe) in enumerate(workers)}
        end = time.monotonic() + timeout
        while waiting:
            ready: list[Any] = mp.connection.wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
            if not ready and problems:
                break
            if not ready:
                raise TimeoutError(f"ranks {sorted(waiting.values())} did not answer within {timeout} s")
            for pipe in ready:
                rank = waiting.pop(pipe)
                good, results[rank] = pipe.recv()
                if not good:
                    problems.append(f"rank {rank}: {results[rank]}")
                    end = min(end, time.monotonic() + LAST_WORDS)  # it may only have lost the one that knows why
        if problems:
            for process, _ in workers:
                process.kill()
            raise RankFailure("\n".join(problems))
        return [results[rank] for rank in range(len(workers))]


def _started() -> tuple[Any, Connection]:
    """Forked from a process that has imported everything: once per session, and not once per rank."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    ours, theirs = context.Pipe()
    # Not a daemon: those may have no children, and a rank has loader workers. It ends when the pipe does.
    process = context.Process(target=_serve, args=(theirs,))
    process.start()
    theirs.close()
    return process, ours


class RankFailure(AssertionError):
    """At least one rank raised; the message holds every traceback."""


class RankDied(RankFailure):
    """Without a word. In processes that set up and take down thousands of process groups, gloo's own thread now and then finds
    the heap in disorder (torch 2.13: `pt_gloo_runloop: segfault` in the kernel's log, twice in dozens of runs of all tests)."""

    def __init__(self, rank: int, process: Any) -> None:
        process.join(10)
        self.of_gloo = process.exitcode == -signal.SIGSEGV
        super().__init__(f"rank {rank} died with exit code {process.exitcode}")


def _serve(pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    unblock_stop_signals()  # the server may be a launcher's, which a test has started in this process before
    torch.set_num_threads(1)
    for number in itertools.count(1):
        try:
            function, args, rank, size, port = pipe.recv()
        except EOFError:
            return
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            SHARDWISE_KEY=f"the key of port {port}",
        )
        try:
            answer = (True, function(*args))
        except BaseException:
            answer = (False, traceback.format_exc())
        if dist.is_initialized():
            dist.destroy_process_group()
        pipe.send(answer)
        if number % 10 == 0:
            gc.unfreeze()
            gc.collect()
        gc.freeze()  # every training begins with a collection, which need not look at all that was imported


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
