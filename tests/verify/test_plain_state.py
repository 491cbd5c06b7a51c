"""State in plain attributes is seen, named and put back; what is no state is let alone."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.verify.plain_state import PlainState, attributes_of

CALLS = {"made": 0}


class Holder:
    """Stands for a task."""

    shared = 1.0

    def __init__(self) -> None:
        self.count = 0
        self.mean = torch.zeros(3)
        self.seen: list[int] = []
        self.queue: deque[int] = deque([1, 2])
        self.generator = torch.Generator().manual_seed(0)
        self.teacher = nn.Linear(2, 2)


def count(holder: Holder) -> None:
    holder.count += 1


def move(holder: Holder) -> None:
    holder.mean.add_(1)


def append(holder: Holder) -> None:
    holder.seen.append(7)


def push(holder: Holder) -> None:
    holder.queue.append(3)


def draw(holder: Holder) -> None:
    torch.rand(1, generator=holder.generator)


def teach(holder: Holder) -> None:
    holder.teacher.weight.data.add_(1)


def fit(holder: Any) -> None:
    holder.fitted = 3.5


def share(holder: Holder) -> None:
    type(holder).shared = 2.0


def use_a_variable(holder: Holder) -> None:
    CALLS["made"] += 1


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (count, "the task's count"),
        (move, "the task's mean"),
        (append, "the task's seen"),
        (push, "the task's queue"),
        (draw, "the task's generator"),
        (teach, "the task's teacher"),
        (fit, "the task's fitted"),
        (share, "Holder.shared"),
        (use_a_variable, "the variable CALLS"),
    ],
)
def test_what_changes_is_named_and_can_be_put_back(change: Any, name: str) -> None:
    holder = Holder()
    state = PlainState(holder)
    assert state.changed() == []
    change(holder)
    assert state.changed() == [name]
    state.put_back()
    assert state.changed() == []


def test_attributes_of_modules_are_told_apart_from_weights_and_buffers() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    before = attributes_of(model)
    model(torch.rand(4, 2)).sum().backward()
    assert attributes_of(model) == before
    model[0].temperature = 0.5  # type: ignore[assignment]
    assert {name for name, each in attributes_of(model).items() if before.get(name) != each} == {"0.temperature"}
