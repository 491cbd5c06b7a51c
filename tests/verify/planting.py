"""verify, on a toy with a planted bug."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from shardwise.verify import conduct
from shardwise.verify.groups import GroupResult, run_groups
from shardwise.verify.proof import verify
from shardwise.verify.report import Report
from shardwise.verify.run_spec import RunSpec

CONFIG = """
task: {task}
training: {{batch_size: 3, gradient_accumulation: 2, gradient_clip: 0.5, optimizer: {{lr: 0.01}}}}
"""
RAGGED = "tests.tasks:Ragged"

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


def run(
    tmp_path: Path,
    bug: str,
    task: str = RAGGED,
    strategy: str = "ddp",
    overrides: Sequence[str] = (),
    *,
    quick: bool = False,
) -> Report:
    config = tmp_path / "toy.yaml"
    config.write_text(CONFIG.format(task=task))
    planted = f"tests.verify.planted:{bug}"
    with pytest.MonkeyPatch.context() as patch:
        if bug in AMONG_RANKS_ONLY:
            patch.setattr(conduct, "run_groups", _sharing((task, strategy, str(quick), *overrides)))
        return verify(
            config, ranks=2, strategy=strategy, planted=planted, hang_timeout=6, overrides=overrides, quick=quick
        )


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
