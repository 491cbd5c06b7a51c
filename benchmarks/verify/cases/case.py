"""What a case is, and how it is written down beside the task or the loop that it is about.

Every file `clean_*.py` and `bug_*.py` of this folder, and `loops.py`, fills `CASES` when it is imported.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

TRAINING: dict[str, Any] = {
    "device": "cpu",
    "batch_size": 8,
    "max_epochs": 3,
    "optimizer": {"lr": 0.01},
    "scheduler": {"warmup_steps": 0},
}


@dataclass(frozen=True)
class Case:
    name: str
    family: str
    what: str
    """What it is; for a bug, what is wrong, in one sentence."""
    target: str
    """`module:Class` of a task, or the file of a loop of its own."""
    bug: bool = False
    cause: str = ""
    """Of a bug: the right first cause, in plain words."""
    accepted: tuple[str, ...] = ()
    """Ids of docs/verify.md that say that; none where no id of today does."""
    visible: str = "always"
    """Where a bug shows, if it is not everywhere."""
    refusal_is_right: bool = False
    """The ranks cannot even start with this bug: exit code 2 is a right answer."""
    ranks: int = 2
    training: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)

    @property
    def is_loop(self) -> bool:
        return self.target.endswith(".py")

    @property
    def strategy(self) -> str:
        for block in ("pipeline", "tensor", "fsdp"):
            if block in self.training:
                return block
        return str(self.training.get("strategy", "ddp"))

    def yaml(self) -> str:
        """The config that a user would write."""
        config = {"task": self.target, "name": self.name, "data": self.data, "training": {**TRAINING, **self.training}}
        return yaml.safe_dump({key: value for key, value in config.items() if value}, sort_keys=False)


CASES: list[Case] = []

DDP: dict[str, Any] = {"strategy": "ddp"}
FSDP: dict[str, Any] = {"fsdp": {"sharding_strategy": "FULL_SHARD"}}
UNUSED: dict[str, Any] = {"strategy": "ddp", "ddp": {"find_unused_parameters": True}}
BF16: dict[str, Any] = {"precision": "bf16-mixed"}
ACCUMULATE: dict[str, Any] = {"gradient_accumulation": 2}


def clean(
    name: str,
    family: str,
    what: str,
    *ways: tuple[str, int, dict[str, Any]],
    ddp: bool = True,
    fsdp: bool = True,
    **all_: Any,
) -> Callable[[type], type]:
    """A correct task: under ddp and fsdp on two ranks, and in these further ways (a name, ranks, training)."""
    two = [("ddp", 2, DDP)] * ddp + [("fsdp", 2, FSDP)] * fsdp

    def note(task: type) -> type:
        for way, ranks, training in [*two, *ways]:
            case = Case(f"{name}-{way}", family, what, f"{task.__module__}:{task.__name__}", ranks=ranks)
            CASES.append(replace(case, training={**all_, **training}))
        return task

    return note


def bug(
    name: str,
    family: str,
    cause: str,
    accepted: Sequence[str] = (),
    *,
    visible: str = "always",
    refusal_is_right: bool = False,
    ranks: int = 2,
    data: dict[str, Any] | None = None,
    **training: Any,
) -> Callable[[type], type]:
    """A task with one mistake; its docstring says which."""

    def note(task: type) -> type:
        what = " ".join((task.__doc__ or "").split())
        target = f"{task.__module__}:{task.__name__}"
        CASES.append(
            Case(
                name, family, what, target, True, cause, tuple(accepted), visible, refusal_is_right, ranks,
                {**DDP, **training}, data or {},
            )
        )  # fmt: skip
        return task

    return note


def loop(
    name: str,
    family: str,
    file: str,
    cause: str = "",
    accepted: Sequence[str] = (),
    *,
    visible: str = "always",
) -> None:
    """A program with a loop of its own; its docstring says what is wrong. Without a cause it is a correct one."""
    what = ast.get_docstring(ast.parse((Path(__file__).parent / file).read_text())) or ""
    CASES.append(Case(name, family, " ".join(what.split()), file, bool(cause), cause, tuple(accepted), visible))
