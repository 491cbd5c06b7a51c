"""A check that cannot fail is worthless: every planted bug is caught, and its cause named."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.verify.causes import Cause
from shardwise.verify.proof import verify
from tests.verify.planting import RAGGED, run

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
    ("one_rank_has_a_loss_term_of_its_own", RAGGED, "ddp", Cause.RANKS_COMPUTE_DIFFERENTLY),
    ("one_rank_has_a_loss_term_of_its_own", RAGGED, "fsdp", Cause.RANKS_COMPUTE_DIFFERENTLY),
    ("one_rank_detaches_a_parameter", RAGGED, "ddp", Cause.ONE_SIDED_PARAMETER),
    ("one_rank_detaches_a_parameter", RAGGED, "fsdp", Cause.ONE_SIDED_PARAMETER),
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
]

# What --quick does not see. The others must be seen by it; those under fsdp, beside all that the whole proof sees.
RESUMED = {Cause.OPTIMIZER_NOT_RESTORED, Cause.SCHEDULE_NOT_RESTORED, Cause.CURSOR_NOT_RESTORED}


@pytest.mark.parametrize(("bug", "task", "strategy", "cause"), PLANTED, ids=lambda value: str(value).rpartition(":")[2])
def test_a_planted_bug_is_caught_and_its_cause_named(
    bug: str, task: str, strategy: str, cause: Cause, tmp_path: Path
) -> None:
    report = run(tmp_path, bug, task, strategy, quick=strategy == "ddp" and cause not in RESUMED)
    assert not report.passed
    assert report.causes[0] is cause, report.as_text()


def test_what_hides_in_the_rounding_of_a_narrow_type_is_seen_in_fp32(tmp_path: Path) -> None:
    narrow = ["training.precision=bf16-mixed"]
    report = run(tmp_path, "gradients_of_ranks_are_two_percent_too_large", overrides=narrow)
    found = {check.name: check.status for check in report.checks}
    assert found["gradients at step 1 in fp32"] == "FAIL", report.as_text()
    assert report.causes[0] is Cause.WRONG_SCALING and report.exit_code == 1


def test_a_parameter_that_some_ranks_do_not_use_is_named_with_the_ranks(tmp_path: Path) -> None:
    """DDP that looks for unused parameters goes on without a word."""
    report = run(tmp_path, "one_rank_detaches_a_parameter", overrides=["training.ddp.find_unused_parameters=true"])
    finding = report.findings[0]
    assert (finding.cause, finding.parameter) == (Cause.ONE_SIDED_PARAMETER, "norm.weight"), report.as_text()
    assert "norm.weight has one on rank 0 only and none on rank 1" in finding.what


def test_the_rank_that_computes_something_else_is_named(tmp_path: Path) -> None:
    finding = run(tmp_path, "one_rank_runs_its_blocks_twice").findings[0]
    assert (finding.cause, finding.rank) == (Cause.RANKS_COMPUTE_DIFFERENTLY, 1)
    assert "those of rank 1 are not what one process gets from the same samples" in finding.what


def test_under_fsdp_blocks_that_only_some_ranks_compute_show_in_the_collectives(tmp_path: Path) -> None:
    finding = run(tmp_path, "one_rank_runs_its_blocks_twice", strategy="fsdp").findings[0]
    assert finding.cause is Cause.COLLECTIVE_MISMATCH
    assert "did not run the same blocks, or not with the same parameters" in finding.what


def test_packed_samples_are_not_taken_for_others_when_something_else_is_wrong(tmp_path: Path) -> None:
    """What one process reads beforehand lies as in the ranks: end to end."""
    cells = ["data.num_cells=120", "data.num_genes=60", "tokenizer.packing=true", "training.device=cpu",
             "model.hidden_dim=16", "model.num_layers=1", "model.num_heads=2"]  # fmt: skip
    report = run(tmp_path, "each_micro_batch_takes_its_own_mean", "cells", overrides=cells)
    assert report.causes[0] is Cause.MEAN_OF_MEANS, report.as_text()


def test_of_a_strategy_that_says_so_differences_in_numbers_are_noted_and_all_else_is_still_checked(
    tmp_path: Path,
) -> None:
    bug, sgd = (
        "a_strategy_averages_weights_instead_of_gradients",
        "training.optimizer={name: sgd, lr: 0.1, momentum: 0}",
    )
    report = run(tmp_path, bug, overrides=[sgd])
    assert report.passed, report.as_text()
    status = {f"{check.group} {check.name}": check.status for check in report.checks}
    assert report.checks[0].detail == "each rank trains on its own gradients"
    for name in ("gradients at step 1", "gradient norm", "loss", "weights after 7 steps", "strategy ddp"):
        assert status[f"parity {name}"] == "note", report.as_text()
    assert (status["agreement weights"], status["resume resumed on 1 rank(s)"]) == ("note", "note")
    for name in ("parity initial weights", "parity samples", "resume killed and resumed", "agreement branches"):
        assert status[name] == "pass", report.as_text()


LOOP = """
import torch
from torch import nn
from shardwise import Loss, Session
from shardwise.config import parse_config

points = [(x, x.prod(dim=0, keepdim=True)) for x in torch.rand(60, 2, generator=torch.Generator().manual_seed(0))]
config = parse_config("task: own\\ntraining: {batch_size: 4, max_epochs: 20, optimizer: {lr: 0.02}}")
with Session(config) as session:
    loss = lambda model, batch: Loss((model(batch[0]) - batch[1]).square().sum(), len(batch[0]))
    session.prepare(model=nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)), data=points, loss=loss)
    RESUME
    for batch in session.batches():
        if session.step(batch).stopped:
            break
        SAVE
"""


@pytest.mark.parametrize(
    ("resume", "save", "answer", "cause"),
    [
        ("session.resume()", "session.save()", "pass", None),
        ("session.resume()", "pass", "fail", Cause.NEVER_SAVES),
        ("pass", "session.save()", "fail", Cause.NEVER_RESUMES),
        ("session.resume()", "session.steps_done % 100 or session.save()", "not proved", None),
    ],
)
def test_a_loop_that_never_saves_or_never_resumes_is_told_so(
    resume: str, save: str, answer: str, cause: Cause | None, in_tmp: Path
) -> None:
    program = in_tmp / "train.py"
    program.write_text(LOOP.replace("RESUME", resume).replace("SAVE", save))
    report = verify(program, ranks=2)
    assert report.answer == answer, report.as_text()
    assert report.causes == ([] if cause is None else [cause]), report.as_text()
