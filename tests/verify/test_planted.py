"""A check that cannot fail is worthless: every planted bug is caught, and its cause named."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.verify.causes import Cause
from shardwise.verify.proof import verify
from shardwise.verify.report import Report

CONFIG = """
task: {task}
training: {{batch_size: 3, gradient_accumulation: 2, gradient_clip: 0.5, optimizer: {{lr: 0.01}}}}
"""
RAGGED = "tests.tasks:Ragged"
# (bug, task, strategy, cause that must be named first)
PLANTED = [
    ("each_micro_batch_takes_its_own_mean", RAGGED, "ddp", Cause.MEAN_OF_MEANS),
    ("the_average_over_ranks_is_not_made_up_for", RAGGED, "ddp", Cause.SCALED_BY_WORLD),
    ("gradients_are_added_up_instead_of_averaged", RAGGED, "fsdp", Cause.SCALED_BY_WORLD),
    ("accumulation_leaves_out_the_last_micro_batch", RAGGED, "ddp", Cause.MICRO_BATCH_LOST),
    ("the_reported_loss_is_rank_zeros", RAGGED, "ddp", Cause.REPORTED_LOSS),
    ("nothing_is_synchronised", RAGGED, "ddp", Cause.ALL_UNSYNCHRONISED),
    ("one_parameter_is_not_synchronised", RAGGED, "ddp", Cause.UNSYNCHRONISED_PARAMETER),
    ("every_rank_seeds_its_own_weights", RAGGED, "ddp", Cause.DIFFERENT_SEEDS),
    ("buffers_are_not_sent_at_the_start", RAGGED, "fsdp", Cause.STALE_BUFFERS),
    ("running_buffers_are_not_shared", "tests.verify.toys:Normed", "fsdp", Cause.STALE_BUFFERS),
    ("only_rank_zero_updates", RAGGED, "ddp", Cause.SOME_RANKS_UPDATE),
    ("the_norm_is_that_of_a_ranks_own_shards", RAGGED, "fsdp", Cause.CLIP_NORM),
    ("tied_weights_are_split", RAGGED, "ddp", Cause.TIED_WEIGHT_SPLIT),
    ("the_rate_grows_with_the_number_of_ranks", RAGGED, "ddp", Cause.SCHEDULE),
    ("every_epoch_has_the_same_order", RAGGED, "ddp", Cause.NOT_RESHUFFLED),
    ("every_rank_gets_the_same_samples", RAGGED, "ddp", Cause.SAMPLER),
    ("the_last_batch_is_filled_up_from_the_start", RAGGED, "ddp", Cause.REPEATED),
    ("the_last_batch_is_dropped", RAGGED, "ddp", Cause.DROPPED),
    ("the_optimizer_state_is_not_loaded", RAGGED, "ddp", Cause.OPTIMIZER_NOT_RESTORED),
    ("the_schedule_starts_over", RAGGED, "ddp", Cause.SCHEDULE_NOT_RESTORED),
    ("the_cursor_is_not_loaded", RAGGED, "ddp", Cause.CURSOR_NOT_RESTORED),
    ("one_rank_stops_early", RAGGED, "ddp", Cause.BRANCHES_DIFFER),
    ("one_rank_calls_another_collective", RAGGED, "ddp", Cause.COLLECTIVE_MISMATCH),
    ("one_rank_never_comes_back", RAGGED, "ddp", Cause.HANG),
    ("one_rank_fails", RAGGED, "ddp", Cause.RANK_FAILED),
    ("nothing", "tests.verify.toys:Noisy", "ddp", Cause.RANDOM_FORWARD),
    ("nothing", "tests.verify.toys:Detached", "ddp", Cause.DETACHED_PARAMETER),
    ("nothing", "tests.verify.toys:Detached", "fsdp", Cause.DETACHED_PARAMETER),
    ("nothing", "tests.verify.toys:Mean", "ddp", Cause.LOSS_IS_NO_SUM),
    ("nothing", "tests.verify.toys:Overlapping", "ddp", Cause.OVERLAP),
    ("nothing", "tests.verify.toys:DrawsPerBatch", "ddp", Cause.ORDER_MATTERS),
]


def run(tmp_path: Path, bug: str, task: str = RAGGED, strategy: str = "ddp", ranks: int = 2) -> Report:
    config = tmp_path / "toy.yaml"
    config.write_text(CONFIG.format(task=task))
    return verify(config, ranks=ranks, strategy=strategy, planted=f"tests.verify.planted:{bug}", patience=6)


@pytest.mark.parametrize(("bug", "task", "strategy", "cause"), PLANTED, ids=lambda value: str(value).rpartition(":")[2])
def test_a_planted_bug_is_caught_and_its_cause_named(
    bug: str, task: str, strategy: str, cause: Cause, tmp_path: Path
) -> None:
    report = run(tmp_path, bug, task, strategy)
    assert not report.passed
    assert report.causes[0] is cause, report.as_text()
