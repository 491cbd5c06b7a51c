"""The process that ranks are forked from: it has imported everything already, so that a rank is there in a moment.

It never touches a GPU: a process that has asked the CUDA driver cannot hand a working one to those it forks.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import signal
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from typing import Any

LAUNCHER = "SHARDWISE_LAUNCHER"
REHEARSED = "SHARDWISE_REHEARSED"
LONGEST = 100_000
"""Characters of one environment variable. Linux takes 128 KiB; a longer config is not rehearsed."""


def start_server(
    preload: Sequence[str],
    rehearsed: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Begin to import the modules `preload`, in a process of its own. `rehearsed`: the values of a config whose model is built
    there.

    Called by the main thread: the kernel ends the server together with the thread that started it.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["shardwise.launch.preload", *preload, "shardwise.launch.freeze_gc"])
    before = dict(os.environ)
    os.environ.update(environment or {})
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    os.environ[LAUNCHER] = str(os.getpid())
    values = json.dumps(rehearsed)
    if rehearsed is not None and len(values) <= LONGEST:
        os.environ[REHEARSED] = values
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


ASKING = {signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP}
"""Signals by which a run is asked to leave. A scheduler may send them to every process of a job."""


def block_stop_signals() -> None:
    """The server does not hear them: it would die, and every rank with it, unsaved. Its ranks inherit that."""
    signal.pthread_sigmask(signal.SIG_BLOCK, ASKING)


def unblock_stop_signals() -> None:
    """A rank, again, does."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKING)


def die_with(parent: int) -> None:
    """Ask the kernel to end this process when its parent ends, even by SIGKILL."""
    with contextlib.suppress(OSError, AttributeError):
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the request was in place
        os._exit(1)
