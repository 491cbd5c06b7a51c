"""Ranks on this machine, through torchrun's elastic agent.

Ctrl-C reaches the agent alone: it asks the ranks to stop, and they leave together at the next step. The ranks die with
the agent, however it dies. When a rank fails, the first real error is what the user sees.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from shardwise.config import Config
from shardwise.errors import LaunchError, ShardwiseError

STOPPED = 130
"""The exit code of a rank, and of the program, that was asked to stop and did."""


def local_rank_count(config: Config, *, cuda_devices: int) -> int:
    """How many ranks to start on this machine."""
    training = config.training
    on_cpu = training.device == "cpu" or (training.device == "auto" and not cuda_devices)
    if training.num_nodes > 1:
        raise LaunchError(
            f"training.num_nodes: {training.num_nodes}: shardwise starts the ranks of one machine by itself. On several, "
            f"start it on each with torchrun --nnodes {training.num_nodes} … -m shardwise train …, or with srun"
        )
    if training.num_gpus is not None:
        if not on_cpu and training.num_gpus > cuda_devices:
            raise LaunchError(
                f"training.num_gpus: {training.num_gpus}, but this machine has {cuda_devices}. "
                "Lower it, or set training.device: cpu to run that many ranks on the CPU"
            )
        return training.num_gpus
    if training.strategy in ("single", "dp"):
        return 1
    return 2 if on_cpu else max(1, cuda_devices)


def run_ranks(entry: Callable[..., int], args: tuple[Any, ...], count: int) -> dict[int, int]:
    """Run `entry(*args)` in `count` new processes. Returns the exit code of each rank."""
    _silence_the_agent()
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // count)))
    # The ranks have a rendezvous store of their own: with a shared one, a restarted rank can dial a dead peer (torch 2.13).
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    with tempfile.TemporaryDirectory(prefix="shardwise-") as scratch, _interrupts_as_sigterm() as interrupts:
        launch = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=count,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="127.0.0.1",  # the machine's own name need not resolve
            max_restarts=0,
            start_method="spawn",
            logs_specs=DefaultLogsSpecs(log_dir=scratch, redirects=Std.NONE, tee=Std.NONE),
            signals_to_handle="SIGTERM,SIGHUP,SIGQUIT",  # Ctrl-C is ours: see _interrupts_as_sigterm
        )
        try:
            return elastic_launch(launch, _rank)(entry, args, scratch, os.getpid())
        except ChildFailedError as failure:
            raise _first_real_error(failure, Path(scratch), count) from None
        except SignalException as stopped:
            raise Interrupted(signal.SIGINT if interrupts else stopped.sigval) from None


class Interrupted(Exception):
    """The ranks were asked to stop, and did."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


@dataclass(frozen=True)
class RankError:
    """What a rank wrote down when it failed."""

    rank: int
    when: float
    message: str
    trace: str
    for_user: bool
    """The message is enough; no traceback is needed."""
    peer_lost: bool
    """It failed because another rank went away."""


def _rank(entry: Callable[..., int], args: tuple[Any, ...], scratch: str, parent: int) -> int:
    die_with(parent)
    try:
        code = entry(*args)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):  # asked twice
            os._exit(STOPPED)
        if isinstance(error, SystemExit):
            error = LaunchError(f"rank {os.environ['RANK']}: the task called sys.exit({error.code}) during the run")
        record_failure(error, Path(scratch), int(os.environ["RANK"]))
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123 - the parent says it once, the agent must not
        raise error from None
    if code == STOPPED:  # the agent no longer reads results: returning would wait for it
        sys.stdout.flush()
        os._exit(STOPPED)
    return code


def record_failure(error: BaseException, folder: Path, rank: int) -> None:
    record = {
        "rank": rank,
        "when": time.time(),
        "message": str(error) if isinstance(error, ShardwiseError) else f"{type(error).__name__}: {error}",
        "trace": "".join(traceback.format_exception(error)),
        "for_user": isinstance(error, ShardwiseError),
        "peer_lost": peer_lost(error),
    }
    aside = folder / f".error-{rank}"
    aside.write_text(json.dumps(record))
    aside.rename(folder / f"error-{rank}.json")


def peer_lost(error: BaseException) -> bool:
    """Whether an error only says that another rank is gone."""
    marks = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket Timeout", "remote process")
    return isinstance(error, RuntimeError | ConnectionError) and any(mark in str(error) for mark in marks)


def _first_real_error(failure: ChildFailedError, scratch: Path, count: int) -> Exception:
    errors = [RankError(**json.loads(file.read_text())) for file in scratch.glob("error-*.json")]
    real = sorted((error for error in errors if not error.peer_lost), key=lambda error: error.when)
    if real:
        first = real[0]
        if first.for_user:
            # Most are agreed on by all ranks, and it is chance which wrote it down first; where the rank matters, it is named.
            return LaunchError(first.message)
        return LaunchError(f"rank {first.rank} failed:\n{first.trace}")
    silent = sorted(set(range(count)) - {error.rank for error in errors})
    rank, died = failure.get_first_failure()
    if not errors and died.exitcode == STOPPED:  # one rank was told to stop, and all did
        return Interrupted(signal.SIGTERM)
    if errors and silent:
        rank = silent[0]
    code = died.exitcode if rank == died.local_rank else None
    how = f"was killed by {signal.Signals(-code).name}" if code and code < 0 else "ended without a word"
    return LaunchError(
        f"rank {rank} {how}. If nobody stopped it, the machine may have run out of memory (see dmesg); "
        "go on from the last checkpoint with --resume auto"
    )


@contextmanager
def _interrupts_as_sigterm() -> Iterator[list[int]]:
    """Ctrl-C goes to every process of the terminal. The ranks must not see it, or they would break off in the middle of
    a collective: it is blocked here, which they inherit, and handed to the agent as SIGTERM. A second one ends all.

    The agent may be asleep when it comes, so a thread takes it: Python tells that thread through a socket.
    """
    seen: list[int] = []
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def listen() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        while received := reader.recv(1):
            if received[0] != signal.SIGINT:
                continue
            if seen:
                os._exit(STOPPED)  # the ranks die with this process
            seen.append(signal.SIGINT)
            print("stopping before the next step; Ctrl-C again to stop at once", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGTERM)

    # Starting multiprocessing's tracker unblocks SIGINT again (Python 3.11), so it is started first.
    resource_tracker.ensure_running()
    handler = signal.signal(signal.SIGINT, lambda number, frame: None)  # without one, nothing is written to the socket
    wakeup = signal.set_wakeup_fd(writer.fileno())
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    listener = threading.Thread(target=listen, name="ctrl-c", daemon=True)
    listener.start()
    try:
        yield seen
    finally:
        signal.set_wakeup_fd(wakeup)
        signal.signal(signal.SIGINT, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        writer.close()
        listener.join()
        reader.close()


def _silence_the_agent() -> None:
    """What it has to say about failures, we say better. Each of its loggers has a level of its own."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing")):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)


def die_with(parent: int) -> None:
    """Ask the kernel to end this rank when the agent ends, even by SIGKILL."""
    with contextlib.suppress(OSError, AttributeError):
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the request was in place
        os._exit(1)
