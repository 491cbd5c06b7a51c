"""Going back to the last whole checkpoint, in this process, and leaving out the global batch that was to blame."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.data import StepBatch
from shardwise.engine.step import Parts, StepResult
from shardwise.errors import LossSpike, NonFiniteError

if TYPE_CHECKING:
    from shardwise.engine.session import Session

Position = tuple[int, int]
"""Of a global batch: its epoch, and the samples of it that come before."""
SkippedBatches = list[Position]


def go_back(session: Session, batch: StepBatch, result: StepResult) -> None:
    """Every rank comes here together. Each rollback leaves out one global batch more, so that the run gets past it."""
    limit = session.config.training.max_rollbacks
    error = LossSpike if result.verdict and result.verdict.what == "spike" else NonFiniteError
    skipped_batches = sorted({*session.skipped_batches, position_of(batch, len(session.train_data))})
    if len(skipped_batches) > limit:
        raise error(
            f"step {result.step}: {result.trouble}.\n  The run has gone back {limit} time(s) already, as often as "
            "training.max_rollbacks allows: the data or the learning rate is the cause, not a single batch. Lower "
            "training.optimizer.lr, set training.gradient_clip, look at bad-samples.jsonl in the run folder"
        )
    at = session.steps_done
    path = session.resume("auto")
    if path is None:
        raise error(
            f"step {result.step}: {result.trouble}.\n  There is no whole checkpoint to go back to in "
            f"{session.store.folder}. Save one before the first step, as `shardwise train` does"
        )
    # Those of later rollbacks are not in the checkpoint, and must not be forgotten.
    session.skipped_batches = sorted({*session.skipped_batches, *skipped_batches})
    result.trouble += f"; back from step {at} to {path}, and this global batch is left out"


def position_of(batch: StepBatch, samples: int) -> Position:
    end = batch.after.consumed if batch.after.epoch == batch.epoch else samples
    return batch.epoch, end - batch.samples


def skipped_batch_step(parts: Parts, batch: StepBatch, steps_done: int) -> StepResult:
    """A step in number only: the rate, the cursor and the length of the run stay what they would have been."""
    return StepResult(
        steps_done + 1,
        skipped=True,
        lr=parts.schedule.rate(steps_done),
        trouble="its global batch is left out since a rollback",
        times={"wait": batch.wait},
    )
