"""Data that each rank makes by itself: the same, or which is other; and folders that give their files in another order."""

from __future__ import annotations

import glob
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.verify.causes import Cause
from shardwise.verify.own_data import _contents, check_data, difference, listed_in


def record(training: list[str], validation: list[str] | None = None) -> dict[str, Any]:
    parts = {"training": training, "validation": validation}
    return {
        "sizes": {name: None if part is None else len(part) for name, part in parts.items()},
        "samples": {name: {i: ({"": each}, {}) for i, each in enumerate(part or [])} for name, part in parts.items()},
    }


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([record(["a", "b"]), record(["a", "b"])], None),
        ([record(["a", "b"]), record(["a", "c"])], (1, "another training sample 1 than rank 0 (the tensor itself)")),
        ([record(["a"]), record(["a"]), record(["a", "b"])], (2, "2 training samples, where rank 0 has 1")),
        (
            [record(["a"], ["x"]), record(["a"], ["y"])],
            (1, "another validation sample 0 than rank 0 (the tensor itself)"),
        ),
        ([record(["a"], ["x"]), record(["a"])], (1, "None validation samples, where rank 0 has 1")),
    ],
)
def test_the_rank_and_the_sample_that_are_other_are_named(ranks: Any, expected: tuple[int, str] | None) -> None:
    assert difference(ranks) == expected


def test_what_was_not_read_by_both_is_not_compared() -> None:
    """Reading stops after a while."""
    cut_short = record(["a", "b"])
    del cut_short["samples"]["training"][1]
    assert difference([cut_short, record(["a", "c"])]) is None


def test_without_a_factor_that_explains_it_the_rank_does() -> None:
    other = [record(["a"]), record(["b"])]
    finding = check_data(other, record(["a"])).finding
    assert finding is not None and (finding.cause, finding.rank) == (Cause.DATA_BY_RANK, 1)
    finding = check_data(other, record(["a"]), [(Cause.DATA_BY_HASH, ". With another hash seed, too")]).finding
    assert finding is not None and finding.cause is Cause.DATA_BY_HASH and "hash seed" in finding.what
    assert check_data([record(["a"]), record(["a"])], record(["a"])).status == "pass"


def test_ranks_that_agree_and_make_other_data_than_one_process_does_are_told() -> None:
    finding = check_data([record(["b"]), record(["b"])], record(["a"])).finding
    assert finding is not None and finding.cause is Cause.DATA_BY_RANK
    assert finding.what.startswith("2 ranks make another training sample 0 than one process")


def test_data_that_change_by_being_read_are_not_put_down_to_the_ranks() -> None:
    finding = check_data([record(["b"]), record(["b"])], record(["a"]), changes=True).finding
    assert finding is not None and finding.cause is Cause.DATA_CHANGE


@pytest.mark.parametrize("order", ["reversed", "2", "3"])
def test_a_folder_gives_the_same_files_in_another_order(order: str, tmp_path: Path) -> None:
    for name in "abcdefgh":
        (tmp_path / name).touch()
    names = sorted(each.name for each in tmp_path.iterdir())
    with listed_in(order):
        listed = [
            os.listdir(tmp_path),  # noqa: PTH208
            [each.name for each in os.scandir(tmp_path)],
            [each.name for each in tmp_path.iterdir()],
            [each.name for each in tmp_path.glob("*")],
            [Path(each).name for each in glob.glob(f"{tmp_path}/*")],  # noqa: PTH207
            *[files for _, _, files in os.walk(tmp_path)],
        ]
        with os.scandir(tmp_path) as entries:
            assert next(entries).name == listed[0][0]
    assert all(each != names and sorted(each) == names for each in listed)
    assert sorted(each.name for each in tmp_path.iterdir()) == names


def test_samples_that_differ_in_their_last_digits_are_the_same_and_in_more_they_are_not() -> None:
    """torch's FFT gives other last digits in another process: it depends on where in memory its input lies."""
    sample = {"wave": torch.randn(17, 3, generator=torch.Generator().manual_seed(1)), "label": torch.tensor([3, 4])}

    def records(**changed: Tensor) -> list[dict[str, Any]]:
        made = [
            {"sizes": {"training": 1}, "samples": {"training": {0: _contents(sample | more)}}} for more in ({}, changed)
        ]
        told: list[dict[str, Any]] = [json.loads(json.dumps(each)) for each in made]
        return told

    rounded = sample["wave"] * (1 + 1e-7 * torch.randn(17, 3, generator=torch.Generator().manual_seed(2)))
    assert not torch.equal(rounded, sample["wave"])
    assert difference(records()) is None
    assert difference(records(wave=rounded)) is None
    other = sample["wave"].clone()
    other[4, 1] += 1e-3
    for changed in (other, sample["wave"].flip(0), -sample["wave"], sample["wave"][:-1], sample["wave"] * 1.0001):
        assert difference(records(wave=changed)) == (1, "another training sample 0 than rank 0 (wave)")
    assert difference(records(label=torch.tensor([4, 3]))) == (1, "another training sample 0 than rank 0 (label)")
    nothing = torch.full((17, 3), torch.nan)
    assert difference(records(wave=nothing)) == (1, "another training sample 0 than rank 0 (wave)")
