"""A check that cannot fail is worthless: every planted bug is caught, and its cause named."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from shardwise.verify import conduct
from shardwise.verify.causes import Cause
from shardwise.verify.groups import GroupResult, run_groups
from shardwise.verify.proof import verify
from shardwise.verify.report import Report
from shardwise.verify.run_spec import RunSpec

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
    ("nothing", "tests.verify.toys:Centring", "ddp", Cause.OWN_BUFFERS),
    ("nothing", "tests.verify.toys:Centring", "fsdp", Cause.OWN_BUFFERS),
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
    ("nothing", "tests.verify.toys:Noisy", "ddp", Cause.RANDOM_FORWARD),
    ("nothing", "tests.verify.toys:MadeAnew", "ddp", Cause.DATA_CHANGE),
    ("nothing", "tests.verify.toys:Detached", "ddp", Cause.DETACHED_PARAMETER),
    ("nothing", "tests.verify.toys:Detached", "fsdp", Cause.DETACHED_PARAMETER),
    ("nothing", "tests.verify.toys:Mean", "ddp", Cause.LOSS_IS_NO_SUM),
    ("nothing", "tests.verify.toys:Overlapping", "ddp", Cause.OVERLAP),
    ("nothing", "tests.verify.toys:DrawsPerBatch", "ddp", Cause.ORDER_MATTERS),
    ("nothing", "tests.verify.toys:FromASet", "ddp", Cause.DATA_BY_HASH),
    ("nothing", "tests.verify.toys:FromAFolder", "ddp", Cause.DATA_BY_LISTING),
    ("nothing", "tests.verify.toys:SlowAndByRank", "ddp", Cause.DATA_BY_RANK),
    ("nothing", "tests.verify.toys:ByThreads", "ddp", Cause.DATA_BY_RANK),
    ("nothing", "tests.verify.toys:HeldOutInAnotherType", "ddp", Cause.OVERLAP),
    ("nothing", "tests.verify.toys:LeavingOut", "ddp", Cause.LOSS_IS_NO_SUM),
    ("nothing", "tests.verify.toys:MaxNorm", "ddp", Cause.WEIGHTS_BY_SAMPLES),
    ("nothing", "tests.verify.toys:ClampingHook", "ddp", Cause.CLIPPED_BEFORE_REDUCED),
    ("nothing", "tests.verify.toys:Remembering", "ddp", Cause.EVALUATION_RANDOM),
    ("nothing", "tests.verify.toys:Freezing", "ddp", Cause.EVALUATION_CHANGES),
    ("nothing", "tests.verify.toys:Switching", "ddp", Cause.EVALUATION_CHANGES),
    ("nothing", "tests.verify.toys:Reseeding", "ddp", Cause.EVALUATION_CHANGES),
    ("nothing", "tests.verify.toys:CountedOnRankZero", "ddp", Cause.METRIC_OF_SOME_RANKS),
    ("nothing", "tests.verify.toys:MeanOfMicroBatches", "fsdp", Cause.METRIC_DIFFERS),
    ("nothing", "tests.verify.toys:AddingUp", "ddp", Cause.EVALUATION_RANDOM),
    ("nothing", "tests.verify.toys:Normalising", "ddp", Cause.HIDDEN_STATE),
    ("nothing", "tests.verify.toys:WithReplacement", "ddp", Cause.REPEATED),
    ("nothing", "tests.verify.toys:RareMean", "ddp", Cause.LOSS_IS_NO_SUM),
]


# Bugs that a process without others never meets: it is run for the first of them, and its records serve the rest.
AMONG_RANKS_ONLY = {
    "nothing_is_synchronised",
    "one_parameter_is_not_synchronised",
    "every_rank_seeds_its_own_weights",
    "buffers_are_not_sent_at_the_start",
    "only_rank_zero_updates",
    "the_norm_is_that_of_a_ranks_own_shards",
    "the_rate_grows_with_the_number_of_ranks",
    "the_optimizer_state_is_not_loaded",
    "the_schedule_starts_over",
    "the_cursor_is_not_loaded",
    "one_rank_stops_early",
    "one_rank_calls_another_collective",
    "one_rank_never_comes_back",
    "one_rank_fails",
    "one_rank_runs_its_blocks_twice",
    "one_rank_detaches_a_parameter",
}


def run(tmp_path: Path, bug: str, task: str = RAGGED, strategy: str = "ddp", overrides: Sequence[str] = ()) -> Report:
    config = tmp_path / "toy.yaml"
    config.write_text(CONFIG.format(task=task))
    planted = f"tests.verify.planted:{bug}"
    with pytest.MonkeyPatch.context() as patch:
        if bug in AMONG_RANKS_ONLY:
            patch.setattr(conduct, "run_groups", _sharing((task, strategy, *overrides)))
        return verify(config, ranks=2, strategy=strategy, planted=planted, hang_timeout=6, overrides=overrides)


def _sharing(key: tuple[str, ...]) -> Callable[..., dict[str, GroupResult]]:
    def run_or_recall(specs: Sequence[RunSpec], at_once: int, *, hang_timeout: float) -> dict[str, GroupResult]:
        known = {spec.name: _known[*key, spec.name] for spec in specs if (*key, spec.name) in _known}
        done = run_groups([spec for spec in specs if spec.name not in known], at_once, hang_timeout=hang_timeout)
        for name, result in done.items():
            alone = result.spec.world == 1 and not result.spec.resume
            followed = result.spec.keep_every_step or result.spec.follow  # what it left in its folder is needed, too
            if alone and not followed and result.fine:
                assert result.records  # read now: their folder goes with the run
                _known[*key, name] = result
        return known | done

    return run_or_recall


_known: dict[tuple[str, ...], GroupResult] = {}


@pytest.mark.parametrize(("bug", "task", "strategy", "cause"), PLANTED, ids=lambda value: str(value).rpartition(":")[2])
def test_a_planted_bug_is_caught_and_its_cause_named(
    bug: str, task: str, strategy: str, cause: Cause, tmp_path: Path
) -> None:
    report = run(tmp_path, bug, task, strategy)
    assert not report.passed
    assert report.causes[0] is cause, report.as_text()


def test_data_that_follow_from_the_loader_worker_are_found_where_the_config_has_workers(tmp_path: Path) -> None:
    report = run(tmp_path, "nothing", "tests.verify.toys:ByWorker", overrides=["data.num_workers=2"])
    assert report.causes[0] is Cause.WORKERS, report.as_text()


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


def test_the_sample_and_the_tensor_that_change_are_named(tmp_path: Path) -> None:
    report = run(tmp_path, "nothing", "tests.verify.toys:DrawsAnew")
    assert report.causes[0] is Cause.DATA_CHANGE
    assert re.search(r"sample \d+: ids is another", report.findings[0].what), report.as_text()
    assert Cause.RANDOM_FORWARD not in report.causes


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


def test_samples_that_are_copies_of_others_leave_open_whether_each_is_used_once(tmp_path: Path) -> None:
    report = run(tmp_path, "nothing", "tests.verify.toys:EveryOther")
    assert report.answer == "not proved", report.as_text()
    check = next(check for check in report.checks if check.name == "samples distinct")
    assert check.status == "not proved" and "26 are copies of another, 1 of 0 for example" in check.detail


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
