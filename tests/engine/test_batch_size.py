"""The search for the largest batch that fits."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.config import resolve_batching, with_batch_size
from shardwise.engine.batch_size import _dividing, found_before, largest
from shardwise.errors import ConfigError
from tests.tasks import config_of


@pytest.mark.parametrize(
    ("room", "cap", "found"),
    [(0, 64, 0), (1, 64, 1), (2, 64, 2), (3, 64, 3), (8, 64, 8), (11, 64, 8), (12, 64, 12), (15, 64, 12), (99, 64, 64),
     (99, 50, 50), (40, 50, 32), (41, 50, 41), (5, 1, 1)],
)  # fmt: skip
def test_sizes_are_doubled_then_refined_once(room: int, cap: int, found: int) -> None:
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= room

    assert largest(fits, cap) == found
    assert max(tried) <= cap and len(tried) == len(set(tried))


def test_with_a_total_batch_size_the_size_divides_it() -> None:
    assert _dividing(12, None, 4) == 12
    assert _dividing(12, 64, 4) == 8
    assert _dividing(3, 30, 2) == 3
    assert _dividing(7, 26, 2) == 1


def test_auto_must_be_found_before_it_can_be_reckoned_with() -> None:
    config = config_of("task: chess\ntraining: {batch_size: auto}\n")
    with pytest.raises(ConfigError, match="batch_size: auto is found when a run begins"):
        resolve_batching(config.training, 2)
    assert resolve_batching(with_batch_size(config, 6).training, 2).global_batch == 12


def test_a_run_that_goes_on_takes_the_size_that_it_began_with(tmp_path: Path) -> None:
    config = config_of("task: chess\ntraining: {batch_size: auto}\n", [f"run_dir={tmp_path}"])
    assert found_before(config).training.batch_size == "auto"
    (tmp_path / "config.yaml").write_text("training: {batch_size: 6}\n")
    assert found_before(config).training.batch_size == 6
    (tmp_path / "config.yaml").write_text("training: {batch_size: {}\n")
    assert found_before(config).training.batch_size == "auto"
    assert found_before(with_batch_size(config, 3)).training.batch_size == 3
