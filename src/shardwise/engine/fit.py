"""The loop that `shardwise train` runs, from the run folder to the summary. The training step itself is in step.py."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from shardwise.config import Config
from shardwise.config.commands import to_start_anew
from shardwise.engine.batch_size import found_before
from shardwise.engine.monitor import FitResult, Monitor
from shardwise.engine.session import Session
from shardwise.engine.shutdown import Stop, Stopped
from shardwise.errors import CheckpointError
from shardwise.watch.console import Console
from shardwise.watch.heartbeats import Phase, beat
from shardwise.watch.run_folder import RunFolder

STATE = 3
"""A checkpoint holds this many times the bytes of the weights: them, and two moments of each."""


def fit(
    config: Config,
    *,
    resume: str | None = None,
    fresh: bool = False,
    all_ranks: bool = False,
    stop: Stop | None = None,
    elastic: bool = False,
    fallback_checkpoint: str | None = None,
) -> FitResult:
    """Train as the config says. Called by every rank.

    `fallback_checkpoint`: a checkpoint of another folder, to begin with where the run has none of its own yet.
    `elastic`: the run goes on by itself, maybe on another number of ranks, and keeps its global batch.
    """
    stop = stop or Stop()
    config = found_before(config) if resume else config
    with stop.listening(), Session(config, elastic=elastic) as session:
        session.startup.of_a_program()
        session.stop_check = lambda: stop.requested
        folder = RunFolder(Path(config.run_folder), session.world.rank)
        notice = session.world.on_first(
            lambda: folder.claim(
                resume=resume is not None,
                fresh=fresh,
                training=config.training,
                checkpoints=Path(config.checkpoint_folder),
            )
        )
        folder.hold()
        if folder.held is not None:
            session.checkpoints.store.held.append(folder.held)
        console = Console(session.world.rank, session.world.size, folder.path, all_ranks=all_ranks)
        try:
            if notice:
                console.say(notice)
            try:
                if elastic:
                    so_far = session.world.on_first(folder.batch_so_far)
                    if said := session.plan.keep_batch(session.config.training, so_far):
                        console.say(said)
                session.prepare()
                resumed = _resume(session, folder, resume, fallback_checkpoint, fresh=fresh)
            except BaseException as error:
                if session.world.is_first:
                    folder.abandon()
                if isinstance(error, Stopped):
                    console.say("stopped before the first step: there is nothing to save")
                raise
            monitor = Monitor(session, folder, console)
            monitor.begin(resumed, resuming=resume is not None)
            session.observers += [monitor, stop]
            stop.state_bytes = STATE * sum(each.nbytes for each in session.strategy.whole.parameters())
            with stop.able_to_save():
                stopped = _train(session, monitor, stop)
                beat(Phase.END)
                return monitor.end(stopped)
        finally:
            console.close()
            folder.close()


def _resume(
    session: Session, folder: RunFolder, which: str | None, fallback_checkpoint: str | None, *, fresh: bool
) -> Path | None:
    """What the run goes on from; None: it begins. From then on, what lies in its checkpoint folder is its own."""
    resumed = session.resume(which) if which else None
    if resumed is None and which:
        session.world.on_first(lambda: _refuse_if_lost(session, folder))
    if resumed is None and fallback_checkpoint is not None:
        resumed = session.resume(fallback_checkpoint)
    if resumed is None:
        session.checkpoints.begin_anew(asked=fresh)
    elif session.checkpoints.saved_at is None:  # from elsewhere: a restart must find it here
        session.save()
    return resumed


def _refuse_if_lost(session: Session, folder: RunFolder) -> None:
    """A run that had checkpoints does not begin again without a word because they cannot be seen."""
    before, store = folder.had_checkpoint(), session.checkpoints.store
    if before is not None:
        raise CheckpointError(
            f"this run had a checkpoint of step {before}, and there is none in {store.folder} now. Is the storage there? "
            + to_start_anew(store.folder)
        )


def _train(session: Session, monitor: Monitor, stop: Stop) -> bool:
    """Returns whether the run was asked to stop before its end."""
    training = session.config.training
    anew = session.steps_done == 0 and session.checkpoints.saved_at is None
    if (training.eval_at_start and anew) or _owes_an_evaluation(session, monitor):
        metrics = _evaluate(session, monitor)
        if metrics is None:
            return _leave(session)
        if session.steps_done and _save_is_due(session):
            _save(session, monitor, metrics)
    if training.may_roll_back and anew:  # to have something to go back to
        _save(session, monitor, None)
    metrics = None
    began = time.monotonic()
    # Where nothing is left to do, the summary says so.
    for batch in session.batches() if session.steps_done < session.total_steps else ():
        result = session.step(batch)
        if result.stopped:
            return _leave(session)
        if result.rollback:
            continue
        stop.stepped(time.monotonic() - began)
        metrics = None
        if _evaluation_is_due(session):
            metrics = _evaluate(session, monitor)
            if metrics is None:
                return _leave(session)
        if _save_is_due(session):
            _save(session, monitor, metrics)
        began = time.monotonic()
    if session.steps_done:
        _save_for_good(session, metrics)
    return False


def _evaluate(session: Session, monitor: Monitor) -> dict[str, float] | None:
    """None: asked to leave in the middle of it. The run makes up for it when it goes on."""
    with monitor.pausing():
        return session.evaluate()


def _save(session: Session, monitor: Monitor, metrics: dict[str, float] | None) -> None:
    with monitor.pausing():
        session.save(metrics)


def _leave(session: Session) -> bool:
    _save_for_good(session, None)
    return True


def _save_for_good(session: Session, metrics: dict[str, float] | None) -> None:
    """The state of this step is in place when this returns. What kept it from being written may have passed: once more."""
    with contextlib.suppress(CheckpointError):  # it has been told
        session.wait()
    if session.checkpoints.saved_at != session.steps_done:
        session.save(metrics)
    session.wait()


def _owes_an_evaluation(session: Session, monitor: Monitor) -> bool:
    """Whether the run was asked to leave in the evaluation of the step that it goes on from."""
    if not session.steps_done or session.valid_data is None or not _evaluation_is_due(session):
        return False
    return not session.world.on_first(lambda: monitor.folder.evaluated_at(session.steps_done))


def _evaluation_is_due(session: Session) -> bool:
    return _due(session, session.config.training.eval_every_n_steps)


def _save_is_due(session: Session) -> bool:
    return _due(session, session.config.training.checkpoint_every_n_steps)


def _due(session: Session, every: int | None) -> bool:
    """Every so many steps, or at the end of each epoch; and at the end of the run."""
    done = session.steps_done
    in_turn = session.cursor.consumed == 0 if every is None else done % every == 0
    return in_turn or done == session.total_steps
