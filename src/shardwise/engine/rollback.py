"""Going back to the last whole checkpoint, in this process, and leaving out the global batch that was to blame."""

from __future__ import annotations

from shardwise.data import StepBatch
from shardwise.engine.parts import Parts
from shardwise.engine.run import Run
from shardwise.engine.state import position_of
from shardwise.engine.step_result import StepResult
from shardwise.errors import LossSpike, NonFiniteError


def go_back(run: Run, batch: StepBatch, result: StepResult) -> None:
    """Every rank comes here together. Each rollback leaves out one global batch more, so that the run gets past it."""
    limit = run.config.training.max_rollbacks
    error = LossSpike if result.decision and result.decision.what == "spike" else NonFiniteError
    skipped_batches = sorted({*run.state.skipped_batches, position_of(batch, len(run.train_data))})
    if len(skipped_batches) > limit:
        raise error(
            f"step {result.step}: {result.trouble}.\n  The run has gone back {limit} time(s) already, as often as "
            "training.max_rollbacks allows: the data or the learning rate is the cause, not a single batch. Lower "
            "training.optimizer.lr, set training.gradient_clip, look at bad-samples.jsonl in the run folder"
        )
    at = run.steps_done
    path = run.resume("auto")
    if path is None:
        raise error(
            f"step {result.step}: {result.trouble}.\n  There is no whole checkpoint to go back to in "
            f"{run.checkpoints.store.folder}. Save one before the first step, as `shardwise train` does"
        )
    # Those of later rollbacks are not in the checkpoint, and must not be forgotten.
    run.state.skipped_batches = sorted({*run.state.skipped_batches, *skipped_batches})
    result.trouble += f"; back from step {at} to {path}, and this global batch is left out"


def skipped_batch_step(parts: Parts, batch: StepBatch, steps_done: int) -> StepResult:
    """A step in number only: the rate, the cursor and the length of the run stay what they would have been."""
    return StepResult(
        steps_done + 1,
        skipped=True,
        lr=parts.schedule.rate(steps_done),
        trouble="its global batch is left out since a rollback",
        times={"wait": batch.wait},
    )
