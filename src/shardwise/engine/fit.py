"""The loop that `shardwise train` runs, from the run folder to the summary. The training step itself is in step.py."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from shardwise.config import Config
from shardwise.engine.batch_size import settled_before
from shardwise.engine.monitor import Monitor, Outcome
from shardwise.engine.numbers import may_roll_back
from shardwise.engine.session import Session
from shardwise.watch.console import Console
from shardwise.watch.run_folder import RunFolder, user_command


def fit(config: Config, *, resume: str | None = None, fresh: bool = False, all_ranks: bool = False) -> Outcome:
    """Train as the config says. Called by every rank."""
    config = settled_before(config) if resume else config
    with Session(config) as session:
        folder = RunFolder(Path(config.run_folder), session.world.rank)
        notice = session.world.on_first(
            lambda: folder.claim(resume=resume is not None, fresh=fresh, command=user_command())
        )
        console = Console(session.world.rank, session.world.size, folder.path, all_ranks=all_ranks)
        try:
            if notice:
                console.say(notice)
            try:
                session.prepare()
                resumed = session.resume(resume) if resume else None
            except BaseException:
                if session.world.is_first:
                    folder.abandon()
                raise
            monitor = Monitor(session, folder, console)
            monitor.begin(resumed, resuming=resume is not None)
            with _stop_on_signal(session):
                stopped = _train(session, monitor)
            return monitor.end(stopped)
        finally:
            console.close()
            folder.close()


def _train(session: Session, monitor: Monitor) -> bool:
    """Returns whether the run was asked to stop before its end."""
    training = session.config.training
    anew = session.steps_done == 0 and session.saved_at is None
    if training.eval_at_start and anew:
        with monitor.pausing():
            monitor.evaluated(session.evaluate())
    if may_roll_back(training) and anew:  # to have something to go back to
        with monitor.pausing():
            monitor.saved(session.save())
    for batch in session.batches():
        result = session.step(batch)
        if result.stopped:
            if session.saved_at != session.steps_done:
                monitor.saved(session.save())
            return True
        if result.rollback:
            monitor.went_back(result)
            continue
        monitor.stepped(result)
        done = session.steps_done
        last = done == session.total_steps
        epoch_ends = session.cursor.consumed == 0
        metrics = None
        if last or _due(done, training.eval_every_n_steps, epoch_ends):
            with monitor.pausing():
                metrics = session.evaluate()
                monitor.evaluated(metrics)
        if last or _due(done, training.checkpoint_every_n_steps, epoch_ends):
            with monitor.pausing():
                monitor.saved(session.save(metrics))
    return False


def _due(step: int, every: int | None, otherwise: bool) -> bool:
    return otherwise if every is None else step % every == 0


@contextmanager
def _stop_on_signal(session: Session) -> Iterator[None]:
    """The first signal asks all ranks to leave together before the next step; a second one leaves at once."""

    asked_at: float | None = None

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked_at
        now = time.monotonic()
        # One Ctrl-C may arrive twice: from the terminal and from the launcher.
        if asked_at is not None and now - asked_at > 0.5:
            raise KeyboardInterrupt
        asked_at = asked_at or now
        session.stop_requested = True

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
