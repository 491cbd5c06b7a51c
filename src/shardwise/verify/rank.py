"""One rank of one run of the proof: its place, a planted bug if a test asks for one, then the user's program."""

from __future__ import annotations

import faulthandler
import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.config import load_config
from shardwise.config.load import load_task_class
from shardwise.engine.session import Session
from shardwise.errors import LaunchError
from shardwise.launch.server import die_with, unblock_stop_signals
from shardwise.verify.dropout import switch_off_dropout
from shardwise.verify.job import Job, environment_for
from shardwise.verify.recorder import Finished, Recorder
from shardwise.watch.failures import record_failure


def rank_main(job: Job, rank: int, port: int, environ: dict[str, str], folder: str) -> None:
    """Called in a process of its own."""
    unblock_stop_signals()
    die_with(os.getppid())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its ranks
    os.environ.clear()
    os.environ.update(environment_for(rank, job, port, environ))
    _name_collectives()
    os.chdir(folder)
    _redirect(job.log(rank))
    with job.stack(rank).open("w") as stack, job.progress(rank).open("a") as progress:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)

        def tell(**sign: Any) -> None:
            progress.write(json.dumps({**sign, "time": time.time()}) + "\n")
            progress.flush()

        try:
            torch.set_num_threads(job.threads)
            _run(job, rank, Recorder(job, rank, tell))
        except BaseException as error:
            if isinstance(error, SystemExit):
                error = LaunchError(f"the program called sys.exit({error.code})")
            record_failure(error, job.folder, rank)
            sys.stdout.flush()
            os._exit(1)
        sys.stdout.flush()
        os._exit(0)  # what the program left behind, such as loader workers, must not keep the rank


def _run(job: Job, rank: int, recorder: Recorder) -> None:
    tell = recorder.tell
    tell(phase="started")
    if job.planted:
        load_planted(job.planted)()
    switch_off_dropout()
    with recorder.installed():
        try:
            if job.target.suffix == ".py":
                sys.argv = [str(job.target)]
                sys.path.insert(0, str(job.target.resolve().parent))
                runpy.run_path(str(job.target), run_name="__main__")
            else:
                plain_loop(job)
        except Finished:
            pass
        recorder.finish()
    tell(phase="ended")


def plain_loop(job: Job) -> None:
    """The loop of Session's docstring."""
    config = load_config(job.target, job.overrides)
    load_task_class(config.task)
    with Session(config) as session:
        session.prepare()
        for batch in session.batches():
            if session.step(batch).stopped:
                break


def load_planted(path: str) -> Any:
    import importlib

    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def _name_collectives() -> None:
    """Bring TORCH_DISTRIBUTED_DEBUG into force, which PyTorch read when the server imported it.

    DDP's own statistics crash on a group that is watched so (torch 2.13): nobody reads them here.
    """
    watching: Any = dist
    watching.set_debug_level_from_env()

    class Quiet(watching.Logger):
        def set_construction_data_and_log(self, *args: Any) -> None: ...
        def set_runtime_stats_and_log(self, *args: Any) -> None: ...

    watching.Logger = Quiet


def _redirect(log: Path) -> None:
    """What a rank prints goes to a file: the report says what matters."""
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
