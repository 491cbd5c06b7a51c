"""Data that take long to make are made once, by the probe, and handed to the other runs of the proof."""

from __future__ import annotations

import os
import pickle
import time
from pathlib import Path

from shardwise.config.seeds import Purpose
from shardwise.data.seeding import seed_everything
from shardwise.engine.observers import Data
from shardwise.engine.run import Run
from shardwise.tasks import Task

SHARED_ABOVE = 1.0
"""Seconds: data that take longer to make are made once and copied."""


def make_shared(run: Run, task: Task, file: Path) -> tuple[Task, Data]:
    """The task and its data. They are put into `file` if they took long."""
    began = time.perf_counter()
    seed_everything(run.config.seed, Purpose.DATA)
    run.world.on_each_machine(task.prepare_data)
    train, valid = task.train_data(), task.valid_data()
    if time.perf_counter() - began > SHARED_ABOVE:
        config, task.config = task.config, None  # its class is made at run time; every run has its own anyway
        try:
            file.write_bytes(pickle.dumps((task, train, valid)))
        except Exception:  # an open file, for example: every run makes its own then
            file.unlink(missing_ok=True)
        task.config = config
    return task, (train, valid)


def take_shared(task: Task, file: Path) -> tuple[Task, Data | None]:
    """The same task, and the data in `file`, if there are some."""
    if not file.exists() or not is_own(file):
        return task, None
    made, train, valid = pickle.loads(file.read_bytes())
    made.config = task.config
    return made, (train, valid)


def is_own(file: Path) -> bool:
    """Whether nobody but this user can have put it there: it is about to be unpickled."""
    about, folder = file.lstat(), file.parent.lstat()
    return about.st_uid == folder.st_uid == os.getuid() and not folder.st_mode & 0o077
