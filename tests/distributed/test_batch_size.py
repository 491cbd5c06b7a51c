"""batch_size: auto on ranks: all find the same, and the run is the one with that size written down."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.distributed import work
from tests.distributed.pool import FreshRanks, RankPool

TEXT = """
task: tests.tasks:Ragged
name: auto
training: {batch_size: auto, max_epochs: 2, gradient_clip: 1.0, optimizer: {lr: 0.01}}
model: {dropout: 0.1}
"""


def train_in(room: float, text: str, overrides: list[str]) -> dict[str, Any]:
    """Train with so many bytes of memory, as far as the search knows; on the last rank, a third more."""
    import os

    from shardwise.engine import batch_size

    more = 4 / 3 if os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1) else 1
    original = batch_size.host_memory
    batch_size.host_memory = lambda: (int(room * more), int(room * more))
    try:
        return work.train(text, overrides)
    finally:
        batch_size.host_memory = original


@pytest.mark.parametrize(
    ("strategy", "size"), [("single", 1), ("ddp", 2), ("zero1", 2), ("fsdp", 2), ("tensor", 2), ("ddp", 4)]
)
def test_the_run_after_auto_is_bit_for_bit_the_run_with_the_size_it_found(
    fresh_ranks: FreshRanks, tmp_path: Path, strategy: str, size: int
) -> None:
    overrides = [f"training.strategy={strategy}", f"run_dir={tmp_path}"]
    auto = fresh_ranks.run(size, functools.partial(train_in, 3.0e6 * size), TEXT, overrides)
    per_rank = max(len(ids) for result in auto for ids in result["ids"])
    assert 1 < per_rank < 26, "bounded by memory, not by the number of samples"
    fixed = fresh_ranks.run(size, work.train, TEXT, [*overrides, f"training.batch_size={per_rank}"])
    for a, b in zip(auto, fixed, strict=True):
        assert a["ids"] == b["ids"] and a["losses"] == b["losses"] and a["norms"] == b["norms"] and a["lrs"] == b["lrs"]
        for name, weight in b["weights"].items():
            assert torch.equal(a["weights"][name], weight), name


def test_batch_norms_statistics_are_put_back(ranks: RankPool, tmp_path: Path) -> None:
    text = "task: tests.distributed.test_loss_guard:Normed\nname: auto\ntraining: {batch_size: auto}\n"
    tracked = ranks.run(1, work.with_session, text, ["training.strategy=single", f"run_dir={tmp_path}"], _tracked)[0]
    assert tracked == 0


def _tracked(session: Any) -> int:
    assert all(parameter.grad is None for parameter in session.parts.parameters)
    return int(session.parts.strategy.module.state_dict()["1.num_batches_tracked"])


def test_the_size_is_said_written_down_and_kept_on_resume(ranks: RankPool, tmp_path: Path) -> None:
    overrides = ["training.strategy=ddp", "training.max_steps=1"]
    first = ranks.run(2, work.run_fit, TEXT, overrides, str(tmp_path))[0]
    assert "batch_size: auto: 26 per device, as large as it may be here (26); predicted:" in first["output"]
    assert "batch 26 per device" in first["output"]
    written = yaml.safe_load((tmp_path / "runs" / "auto" / "config.yaml").read_text())
    assert written["training"]["batch_size"] == 26
    job = functools.partial(work.run_fit, resume="auto")
    again = ranks.run(2, job, TEXT, ["training.strategy=ddp"], str(tmp_path))[0]
    assert "batch_size: auto" not in again["output"] and "batch 26 per device" in again["output"]
    assert "training.batch_size" not in again["output"], "nothing was changed"


def test_with_a_total_batch_size_the_global_batch_is_that(ranks: RankPool, tmp_path: Path) -> None:
    overrides = ["training.strategy=ddp", "training.total_batch_size=40", f"run_dir={tmp_path}"]
    for result in ranks.run(2, work.train, TEXT, overrides):
        assert len(result["ids"][0]) == 20


def test_what_cannot_fit_or_cannot_be_found_is_answered(ranks: RankPool, tmp_path: Path) -> None:
    overrides = ["training.strategy=ddp", f"run_dir={tmp_path}"]
    with pytest.raises(AssertionError, match="not even one sample fits: predicted") as failure:
        ranks.run(2, functools.partial(train_in, 10.0), TEXT, overrides)
    assert str(failure.value).count("not even one sample fits") == 2, "every rank says so, none waits"
    with pytest.raises(AssertionError, match="batch_size: auto does not go with strategy pipeline"):
        ranks.run(2, work.train, TEXT, ["training.strategy=pipeline", f"run_dir={tmp_path}"])
