"""Samples of a task that says nothing about them are compared all the same: by their place, or by what some of them hold."""

from __future__ import annotations

import dataclasses
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, random_split

from shardwise.data import BatchedSamples, fingerprint
from shardwise.data.fingerprint import contents_of_any
from shardwise.data.fingerprint import fingerprint as fingerprint_of
from shardwise.data.overlap import ANY, NEVER, SampleContents


class Numbers(Dataset[torch.Tensor]):
    """Made when it is read, as files are."""

    def __init__(self, first: int, count: int, log: Path | None = None) -> None:
        self.first, self.count, self.log = first, count, log

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.log is not None:
            with self.log.open("a") as stream:
                stream.write(f"{os.getpid()}\n")
        return torch.tensor([self.first + index])


def _all(data: Numbers) -> list[torch.Tensor]:
    return [data[index] for index in range(len(data))]


def compared(train: Any, valid: Any) -> SampleContents:
    found = contents_of_any(train, valid, seed=0)
    assert found is not None
    return found


def shared(found: SampleContents) -> int:
    assert found.valid is not None
    return int(np.isin(found.valid.numbers, found.train.numbers).sum())


@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.bfloat16])
def test_copies_are_found_in_another_type_of_numbers(kind: torch.dtype) -> None:
    held = [each.float() for each in _all(Numbers(5, 10))]
    assert shared(compared(held, [each.to(kind) for each in held])) == 10
    assert shared(compared(held, [each.numpy() for each in held])) == 10
    assert shared(compared(_all(Numbers(5, 10)), [each.int() for each in _all(Numbers(0, 10))])) == 5


def test_parts_of_one_data_set_are_compared_by_place_and_nothing_is_read() -> None:
    class Unread(Numbers):
        def __getitem__(self, index: int) -> torch.Tensor:
            raise AssertionError("read")

    data = Unread(0, 1_000)
    assert shared(compared(data, data)) == 1_000
    apart = random_split(data, [900, 100])
    assert shared(compared(*apart)) == 0
    overlapping = compared(Subset(data, range(900)), Subset(Subset(data, range(800, 1000)), range(150)))
    assert shared(overlapping) == 100 and overlapping.error_above == ANY
    assert overlapping.valid is not None and overlapping.valid.name(3) == "sample 803 of the data set"


@pytest.mark.parametrize("kind", ["read", "in memory"])
@pytest.mark.parametrize(("first", "count"), [(0, 40), (960, 40), (1, 900)])
def test_samples_that_hold_the_same_are_found_where_one_part_was_cut_off_the_other(
    kind: str, first: int, count: int
) -> None:
    whole, part = Numbers(0, 1000), Numbers(first, count)
    found = compared(whole, part) if kind == "read" else compared(_all(whole), _all(part))
    assert shared(found) >= 1 and found.error_above == NEVER, "equal values may be chance"


def test_data_sets_that_differ_share_nothing() -> None:
    assert shared(compared(Numbers(0, 1000), Numbers(1000, 100))) == 0


def test_a_data_set_that_keeps_a_state_is_to_training_as_if_nobody_had_read_it(tmp_path: Path) -> None:
    class Stateful(Numbers):
        drawn = 0

        def __getitem__(self, index: int) -> torch.Tensor:
            self.drawn += 1
            return super().__getitem__(index)

    train, valid = Stateful(0, 50, tmp_path / "log"), Stateful(50, 10, tmp_path / "log")
    compared(train, valid)
    assert (train.drawn, valid.drawn) == (0, 0)
    assert str(os.getpid()) not in (tmp_path / "log").read_text().split()


def test_what_is_drawn_when_a_sample_is_read_is_not_taken_for_equal_and_changes_nothing_else() -> None:
    class Drawn(Numbers):
        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.tensor([torch.rand(()), random.random(), np.random.random()])

    torch.manual_seed(3)
    random.seed(3)
    expected = torch.rand(()), random.random()
    torch.manual_seed(3)
    random.seed(3)
    assert shared(compared(Drawn(0, 50), Drawn(0, 50))) == 0
    assert (torch.rand(()), random.random()) == expected


def test_no_more_is_read_than_the_limits_allow_and_what_was_looked_at_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "AT_MOST", 20)
    found = compared(Numbers(0, 1000), Numbers(0, 10))
    assert len(found.train.numbers) == 20 and shared(found) >= 1
    assert found.looked_at == " (20 of 1000 training samples and 10 of 10 validation samples were compared)"
    assert found.valid is not None and found.valid.name(1) == "validation sample 9", "the ends come first"
    monkeypatch.setattr(fingerprint, "SECONDS", -1.0)  # over before the first
    assert len(compared(Numbers(0, 1000), Numbers(0, 10)).train.numbers) == 1


def test_a_sample_that_cannot_be_read_is_left_to_training_to_tell() -> None:
    class Broken(Numbers):
        def __getitem__(self, index: int) -> torch.Tensor:
            raise OSError("gone")

    assert contents_of_any(Numbers(0, 3), Broken(0, 3), seed=0) is None
    assert contents_of_any(Numbers(0, 3), None, seed=0) is None


def test_batched_samples_are_read_one_by_one() -> None:
    class Batches(BatchedSamples):
        def __init__(self, first: int) -> None:
            self.first = first

        def __len__(self) -> int:
            return 30

        def read(self, ids: Any, epoch: int) -> Any:
            return torch.from_numpy(ids + self.first)

        def join(self, parts: list[Any]) -> Any:
            return torch.cat(parts)

        def take_apart(self, batch: Any, sizes: list[int]) -> list[Any]:
            return list(batch.split(sizes))

    assert shared(compared(Batches(0), Batches(20))) == 10


@dataclasses.dataclass
class Pair:
    x: torch.Tensor
    name: str


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (torch.tensor(1.0, dtype=torch.bfloat16), torch.tensor(2.0, dtype=torch.bfloat16)),
        (np.arange(3), np.arange(3) + 1),
        ({"a": 1, "b": 2}, {"a": 2, "b": 1}),
        ([1, [2]], [[1], 2]),
        (("ab", "c"), ("a", "bc")),
        (1, True),
        (None, 0),
        (b"a", "a"),
        (Pair(torch.ones(1), "a"), Pair(torch.ones(1), "b")),
        (np.array([None, 1], object), np.array([None, 2], object)),
    ],
)
def test_what_differs_in_value_type_or_shape_has_another_fingerprint(one: Any, other: Any) -> None:
    import copy

    assert fingerprint_of(one) != fingerprint_of(other)
    assert fingerprint_of(one) == fingerprint_of(copy.deepcopy(one))


def test_the_order_of_a_mapping_does_not_matter() -> None:
    assert fingerprint_of({"a": 1, "b": 2}) == fingerprint_of({"b": 2, "a": 1})
