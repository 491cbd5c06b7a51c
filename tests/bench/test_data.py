"""The loader profile: what it measures, and what it tells a person to do."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.bench.data import Costs, Pace, _verdict, profile_data
from shardwise.cli import main
from shardwise.tasks import Loss, Task
from tests.tasks import config_of


class Slow(Task):
    """Every sample takes five milliseconds to read, every batch ten to collate; the model nearly nothing."""

    def train_data(self) -> Any:
        return _SlowData()

    def collate(self, samples: list[Any]) -> Tensor:
        time.sleep(0.01)
        return torch.stack(samples)

    def build_model(self) -> torch.nn.Module:
        return torch.nn.Linear(2, 1)

    def loss(self, model: torch.nn.Module, batch: Tensor) -> Loss:
        return Loss(model(batch).square().sum(), len(batch))


class _SlowData:
    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(0.005)
        return torch.ones(2)


def test_the_parts_of_loading_are_measured_apart() -> None:
    config = config_of("task: tests.bench.test_data:Slow\ntraining: {batch_size: 4}")
    profile = profile_data(config, [0, 2], steps=4, cores=2)
    # What sleeps cannot be faster than it sleeps; how much slower it is depends on the machine.
    assert profile.costs.read >= 20
    assert profile.costs.collate >= 10
    assert [pace.workers for pace in profile.paces] == [0, 2]
    assert profile.paces[0].wait >= 30
    assert profile.paces[0].samples_per_second <= 4 / 0.03


PLENTY = Costs(read=30, collate=5, move=1, compute=50)


@pytest.mark.parametrize(
    ("paces", "configured", "expected"),
    [
        (
            [(0, 0.02), (2, 0.01)],
            0,
            "The data keeps up: with 0 workers 2% of a step is waiting. Reading is the largest part",
        ),
        ([(0, 0.4), (1, 0.2), (2, 0.03)], 0, "Set data.num_workers: 2: waiting falls from 40% to 3% of a step."),
        ([(0, 0.4), (2, 0.05), (4, 0.05)], 0, "Set data.num_workers: 2: waiting falls from 40% to 5% of a step."),
        (
            [(0, 0.8), (2, 0.6)],
            2,
            "The data does not keep up: even with 2 workers 60% of a step is waiting, on 2 cores.",
        ),
    ],
)
def test_the_verdict_says_which_it_is_and_what_to_set(
    paces: list[tuple[int, float]], configured: int, expected: str
) -> None:
    measured = [Pace(workers, 100.0, 10.0, share) for workers, share in paces]
    assert _verdict(PLENTY, measured, 2, configured).startswith(expected)


@pytest.mark.parametrize(
    ("costs", "remedy"),
    [
        (PLENTY, "make a sample cheaper to read"),
        (Costs(1, 30, 1, 50), "make the task's collate cheaper"),
        (Costs(1, 2, 30, 50), "set data.pin_memory: true"),
    ],
)
def test_where_workers_do_not_help_the_verdict_names_the_slow_part(costs: Costs, remedy: str) -> None:
    assert remedy in _verdict(costs, [Pace(0, 1.0, 1.0, 0.9)], 2, 0)


@pytest.mark.slow
def test_the_program_prints_a_table_or_json(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (in_tmp / "cells.yaml").write_text("task: cells\ndata: {num_cells: 100, num_genes: 20}\ntraining: {batch_size: 4}")
    assert main(["bench", "data", "cells.yaml", "--steps", "2", "--workers", "0,1"]) == 0
    output = capsys.readouterr().out
    assert "in one process, ms per micro-batch:  read" in output
    assert [line.split()[0] for line in output.splitlines() if line.endswith("%")] == ["0", "1"]
    assert main(["bench", "data", "cells.yaml", "--steps", "2", "--workers", "0", "--json"]) == 0
    profile = json.loads(capsys.readouterr().out)
    assert profile["costs"].keys() == {"read", "collate", "move", "compute"}
    assert main(["bench", "data", "cells.yaml", "--workers", "two"]) == 2
    assert "--workers two: write numbers with commas" in capsys.readouterr().err
    assert not (in_tmp / "runs").exists(), "a measurement leaves no run behind"
