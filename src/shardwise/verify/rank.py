"""One rank of one run of the proof: a planted bug if a test asks for one, then the user's program, which is observed."""

from __future__ import annotations

import contextlib
import importlib
import os
import runpy
import sys
from typing import Any

import torch
import torch.distributed as dist

from shardwise.config.load import config_from_values, load_task_class
from shardwise.engine.observers import observing
from shardwise.engine.session import Session
from shardwise.verify.coverage import cover
from shardwise.verify.dropout import switch_off_dropout
from shardwise.verify.own_data import listed_in
from shardwise.verify.probe import probe
from shardwise.verify.recorder import Finished, Look, Recorder
from shardwise.verify.run_spec import RunSpec

LOOKS: dict[str, Look] = {"probe": probe, "coverage": cover}


def rank(spec: RunSpec) -> int:
    """Called in a process of its own."""
    _compare_collectives()
    number = int(os.environ["RANK"])
    interpreter = spec.interpreters[number] if spec.interpreters else None
    torch.set_num_threads(interpreter.threads if interpreter else spec.threads)
    if spec.planted:
        module, _, name = spec.planted.partition(":")
        getattr(importlib.import_module(module), name)()
    switch_off_dropout()
    listing = interpreter.listing if interpreter else "natural"
    recorder = Recorder(spec, number, LOOKS.get(spec.kind))
    with observing(recorder), listed_in(listing):
        with contextlib.suppress(Finished):
            _train(spec)
        recorder.finish()
    return 0


def _train(spec: RunSpec) -> None:
    """The user's program, or for a config the loop of Session's docstring."""
    if spec.values is None:
        sys.argv = [str(spec.target)]
        sys.path.insert(0, str(spec.target.resolve().parent))
        runpy.run_path(str(spec.target), run_name="__main__")
        return
    config = config_from_values(spec.values)
    load_task_class(config.task)
    with Session(config) as session:
        session.prepare()
        for batch in session.batches():
            if session.step(batch).stopped:
                break


def _compare_collectives() -> None:
    """Bring TORCH_DISTRIBUTED_DEBUG into force, which PyTorch read when the server imported it.

    DDP's own statistics crash on a group that is watched so (torch 2.13): nobody reads them here.
    """
    watching: Any = dist
    watching.set_debug_level_from_env()

    class Quiet(watching.Logger):
        def set_construction_data_and_log(self, *args: Any) -> None: ...
        def set_runtime_stats_and_log(self, *args: Any) -> None: ...

    watching.Logger = Quiet
