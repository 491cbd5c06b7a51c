"""`shardwise checkpoint list|verify|repair RUN`."""

from __future__ import annotations

import argparse
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.cli.arguments import path_text
from shardwise.cli.output import show
from shardwise.config.commands import command
from shardwise.watch.console import PLAIN

if TYPE_CHECKING:
    from shardwise.checkpoint import CheckpointStore, Found

log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, text in {
        "list": "what there is: step, metric, size, time; which is the best and which would be resumed",
        "verify": "compare every file with its checksum, and what the files hold with the index; exit code 1 if one is damaged. "
        "Nothing is changed",
        "repair": "set damaged ones aside and clear away what was never finished, so that the newest whole one counts",
    }.items():
        action = actions.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        action.add_argument("run", type=path_text, help="the folder of a run, or of checkpoints")


def run(args: argparse.Namespace) -> int:
    from shardwise.checkpoint import CheckpointStore
    from shardwise.errors import CheckpointError

    folder = Path(args.run)
    inside = folder / "checkpoints"
    store = CheckpointStore(inside if inside.is_dir() else folder)
    if not store.folder.is_dir():
        raise CheckpointError(f"there is no folder {folder}")
    if not store.every() and not store.leftovers():
        raise CheckpointError(f"there are no checkpoints in {store.folder}")
    if args.action == "verify":
        return _verify(store, command("checkpoint", "repair", args.run))
    return (_list if args.action == "list" else _repair)(store)


def _list(store: CheckpointStore) -> int:
    from shardwise.engine.state import RunState
    from shardwise.errors import CheckpointError

    every = store.every()
    show(f"{'step':>10}  {'epoch':>5}  {'metric':>10}  {'size':>10}  written")
    for found in every:
        try:
            size = f"{_bytes_of(found) / 2**20:.1f} MiB"
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.path.stat().st_mtime))
        except FileNotFoundError:
            continue  # the run that is going on has removed it meanwhile
        try:
            epoch = str(RunState.of_checkpoint(found.path).cursor.epoch)
        except CheckpointError:
            epoch = "?"
        metric = "" if found.metric is None else f"{found.metric:.4g}"
        note = "  newest: this is what --resume auto takes, if it is whole" if found is every[-1] else ""
        if found.newer:
            note = f"  {found.newer}; left as it is"
        show(f"{found.step:>10}  {epoch:>5}  {metric:>10}  {size:>10}  {when}{note}")
    for path, what in store.leftovers():
        show(f"  {path.name}: {what}")
    return 0


def _bytes_of(found: Found) -> int:
    return sum(file.lstat().st_size for file in found.path.iterdir())


def _verify(store: CheckpointStore, repair: str) -> int:
    """`repair`: the command that does it."""
    from shardwise.checkpoint.inspect import condition_of_checkpoint
    from shardwise.data.manifest import surplus_in

    damaged: list[Found] = []
    unread: list[Found] = []
    newer: list[Found] = []
    for found in store.every():
        began = time.perf_counter()
        condition = condition_of_checkpoint(found.path)
        seconds = time.perf_counter() - began
        try:
            size = _bytes_of(found) / 2**20
            surplus = [] if condition.problems else surplus_in(found.path)
        except OSError:
            if not found.path.is_dir():
                show(f"{found.path}: removed meanwhile, by the run that is going on")
                continue
            size, surplus = 0.0, []
        if condition.problems:
            show(f"{found.path}: {'; '.join(condition.problems)}")
            (newer if condition.newer else unread if condition.unreadable else damaged).append(found)
            continue
        show(f"{found.path}: whole ({size:.1f} MiB in {seconds:.1f} s)")
        for name in surplus:
            show(f"  note: {name} does not belong to it, and does no harm")
    if damaged:
        log.error(f"damaged: step {_steps(damaged)}. To set them aside, as a resume would:  {repair}", extra=PLAIN)
    if unread:
        log.error(f"could not be read: step {_steps(unread)}. Is the storage there, and may you read it?", extra=PLAIN)
    if newer:
        log.error(f"of a newer shardwise: step {_steps(newer)}. Update shardwise to check it", extra=PLAIN)
    return 1 if damaged or unread or newer else 0


def _steps(every: list[Found]) -> str:
    return ", ".join(str(found.step) for found in every)


def _repair(store: CheckpointStore) -> int:
    from shardwise.watch.lock import lock_folder

    run = store.folder.parent
    for folder in (store.folder, run) if (run / "run.json").exists() else (store.folder,):
        lock_folder(folder)  # for as long as this process lives: a run that is going on is not repaired
    done = store.repair()
    for sentence in done:
        show(sentence)
    whole, complaints = store.newest_whole()
    for complaint in complaints:
        show(complaint)
    if not done and not complaints:
        show("there was nothing to repair")
    if whole is None:
        log.error(f"no whole checkpoint is left in {store.folder}", extra=PLAIN)
        return 1
    show(f"--resume auto goes on from {whole}")
    return 0
