"""Ranks that somebody else started, or that run in the program's own process: one of each machine starts their overseer."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from shardwise.config import Config
from shardwise.launch.environment import attempt
from shardwise.launch.rank import watched
from shardwise.launch.scratch import holding, no_room_for_temporary_files, sweep

log = logging.getLogger(__name__)


@contextmanager
def external_ranks(config: Config) -> Iterator[None]:
    """This rank beats; the first of its machine starts a small process that watches all of them."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    first = os.environ.get("LOCAL_RANK", "0") == "0" or world == 1
    beats = _shared_folder()
    if beats is None:
        yield
        return
    if not first:
        with watched(beats, rank, world):
            yield
        return
    with ExitStack() as stack:
        try:
            stack.enter_context(holding(beats))
            sweep()
        except OSError as error:
            log.warning(f"the run is not watched, so a hang is not noticed: {no_room_for_temporary_files(error)}")
            shutil.rmtree(beats, ignore_errors=True)
            yield
            return
        overseer = _start(beats, config)
        try:
            with watched(beats, rank, world):
                yield
        finally:
            overseer.kill()
            overseer.wait()
            shutil.rmtree(beats, ignore_errors=True)


def _shared_folder() -> Path | None:
    """The same for all ranks of a job on this machine, of this user alone; None: somebody else has taken the name."""
    keys = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID", "MASTER_ADDR", "MASTER_PORT")
    own = [os.environ[key] for key in keys if key in os.environ] or [str(os.getpid())]
    name = hashlib.sha256(" ".join([*own, str(attempt())]).encode()).hexdigest()[:16]
    with contextlib.suppress(OSError):  # there may be no folder for temporary files
        folder = Path(tempfile.gettempdir()) / f"shardwise-{os.getuid()}-{name}"
        folder.mkdir(mode=0o700, exist_ok=True)
        if not folder.is_symlink() and folder.stat().st_uid == os.getuid():
            return folder
    return None


def _start(beats: Path, config: Config) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "shardwise.watch.watchdog",
        "--beats",
        str(beats),
        "--run-folder",
        config.run_folder,
    ]
    command += ["--hang-timeout", str(config.training.hang_timeout), "--parent", str(os.getpid())]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
