"""A rank that is really slow, found in a run."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from shardwise.tasks import Loss
from tests.distributed import work
from tests.distributed.pool import RankPool
from tests.tasks import Ragged

NAP = 0.03


class SlowCompute(Ragged):
    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        if os.environ["RANK"] == "1" and model.training:
            time.sleep(NAP)
        return super().loss(model, batch)


class SlowData(Ragged):
    def train_data(self) -> Any:
        data = super().train_data()
        return _Sleepy(data) if os.environ["RANK"] == "1" else data


class _Sleepy(list[Tensor]):
    def __getitem__(self, index: Any) -> Any:
        time.sleep(NAP)
        return super().__getitem__(index)


@pytest.mark.parametrize(
    ("task", "cause", "size"), [("SlowCompute", "compute", 2), ("SlowData", "data", 2), ("SlowCompute", "compute", 3)]
)
def test_the_slow_rank_and_its_cause_are_named_once_and_recorded(
    ranks: RankPool, tmp_path: Path, task: str, cause: str, size: int
) -> None:
    text = f"""
task: tests.distributed.test_stragglers:{task}
name: slow
training: {{batch_size: 1, max_epochs: 4, max_steps: 60, log_every_n_steps: 10, eval_at_start: false}}
"""
    overrides = ["training.strategy=ddp", "data.samples=180"]
    output = ranks.run(size, work.run_fit, text, overrides, str(tmp_path))[0]["output"]
    assert output.count(f"rank 1 ({os.uname().nodename}) is slow by its {cause}") == 1, output
    assert output.count("is slow by its") == 1
    run = tmp_path / "runs" / "slow"
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = [straggler for record in records for straggler in record.get("stragglers", [])]
    assert [(each["rank"], each["cause"]) for each in found] == [(1, cause)]
    own = [json.loads(line) for line in (run / "ranks" / "rank-0001.jsonl").read_text().splitlines()]
    assert [line["straggler"] for line in own if "straggler" in line] == [cause]


def test_a_rank_that_comes_late_for_no_reason_of_its_own_is_slow_by_its_communication(
    ranks: RankPool, tmp_path: Path
) -> None:
    text = "task: tests.tasks:Ragged\nname: slow\ntraining: {batch_size: 1, max_steps: 60, max_epochs: 4}\n"
    overrides = ["training.strategy=ddp", "data.samples=180"]
    output = ranks.run(2, _late, text, overrides, str(tmp_path))[0]["output"]
    assert output.count("is slow by its communication") == 1, output
    assert "comes" in output and "later to every step than the others" in output


def _late(text: str, overrides: list[str], folder: str) -> Any:
    """Rank 1 comes late to every step, with its data in hand."""
    from shardwise.engine import session as session_module

    original = session_module.run_step

    def late(parts: Any, *args: Any, **options: Any) -> Any:
        if parts.world.rank == 1:
            time.sleep(NAP)
        return original(parts, *args, **options)

    session_module.run_step = late
    try:
        return work.run_fit(text, overrides, folder)
    finally:
        session_module.run_step = original


def test_a_run_of_equal_ranks_names_nobody(ranks: RankPool, tmp_path: Path) -> None:
    text = "task: tests.tasks:Ragged\nname: equal\ntraining: {batch_size: 2, max_epochs: 6, log_every_n_steps: 10}\n"
    for strategy in ("ddp", "fsdp"):
        overrides = [f"training.strategy={strategy}", f"run_dir=runs/{strategy}", "data.samples=200"]
        output = ranks.run(2, work.run_fit, text, overrides, str(tmp_path))[0]["output"]
        assert "is slow by its" not in output
