"""RunState: all that a run must remember, besides its tensors. A session holds it, a checkpoint writes it, a resume returns it.

Random states and the learning rate are not here: they follow from the seed and the step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shardwise.data import Cursor, StepBatch
from shardwise.data.manifest import read_manifest
from shardwise.engine.loss_guard import LossHistory
from shardwise.errors import CheckpointError, one_line

Position = tuple[int, int]
"""Of a global batch: its epoch, and the samples of it that come before."""


@dataclass
class RunState:
    step: int = 0
    """Steps made."""
    cursor: Cursor = field(default_factory=Cursor)
    skipped_steps: int = 0
    metric: float | None = None
    """`training.monitor`, as it was evaluated at this step; None where it was not."""
    best_metric: float | None = None
    scaler: dict[str, Any] = field(default_factory=dict)
    """The loss scale of fp16."""
    skipped_batches: list[Position] = field(default_factory=list)
    """Global batches that rollbacks leave out."""
    recent_losses: LossHistory = field(default_factory=LossHistory)
    """Of the last steps, where spikes are watched for: a resumed run must find the same ones."""

    # What makes it this run: to notice a resume in another one.
    global_batch: int = 0
    samples: int = 0
    seed: int = 0
    order: str = ""
    """The name of the order in which samples come."""
    labels: list[str] = field(default_factory=list)
    """What the model's outputs stand for, where the data have decided it."""

    def step_made(self, batch: StepBatch, *, skipped: bool) -> None:
        self.step += 1
        self.skipped_steps += skipped
        self.cursor = batch.after

    def evaluated(self, metric: float | None, mode: str) -> None:
        """Before a checkpoint of this step: what the monitored metric is, if it is known. `mode`: min or max is best."""
        self.metric = metric
        if metric is None or not math.isfinite(metric):
            return
        best = self.best_metric
        if best is None or (metric < best if mode == "min" else metric > best):
            self.best_metric = metric

    def as_plain(self) -> dict[str, Any]:
        """As JSON knows it."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        cursor = {"epoch": self.cursor.epoch, "consumed": self.cursor.consumed}
        skipped_batches = [list(position) for position in self.skipped_batches]
        return {
            **values,
            "cursor": cursor,
            "skipped_batches": skipped_batches,
            "recent_losses": [*self.recent_losses.recent],
        }

    @classmethod
    def of_checkpoint(cls, folder: Path) -> RunState:
        try:
            values = dict(read_manifest(folder)["about"])
            values.setdefault("skipped_batches", values.pop("left_out", []))  # its name in version 0.1.0
            if unknown := values.keys() - _Plain.model_fields.keys():
                named = one_line(", ".join(sorted(unknown)), 80)
                raise ValueError(
                    f"it holds {named}, which a newer one may know. Update shardwise, or name an earlier checkpoint by its path"
                )
            plain = _Plain.model_validate(values).model_dump(exclude_unset=True)
            plain["skipped_batches"] = [(epoch, before) for epoch, before in plain["skipped_batches"]]
            plain["recent_losses"] = LossHistory(plain.get("recent_losses", ()))
            return cls(**{**plain, "cursor": Cursor(**plain["cursor"])})
        except ValueError as error:
            said = _first_of(error) if isinstance(error, ValidationError) else str(error)
            raise CheckpointError(f"checkpoint {folder} was not written by this version of shardwise: {said}") from None


_Count = Annotated[int, Field(ge=0, lt=2**63)]
_STRICT = ConfigDict(extra="forbid", strict=True)


class _PlainCursor(BaseModel):
    model_config = _STRICT
    epoch: _Count
    consumed: _Count


class _Plain(BaseModel):
    """RunState as JSON knows it. What a checkpoint says is not believed before its types are right."""

    model_config = _STRICT
    step: _Count
    cursor: _PlainCursor
    skipped_batches: list[Annotated[list[_Count], Field(min_length=2, max_length=2)]]
    skipped_steps: _Count = 0
    metric: float | None = None
    best_metric: float | None = None
    scaler: dict[str, int | float] = {}
    recent_losses: list[float] = []
    global_batch: _Count = 0
    samples: _Count = 0
    seed: _Count = 0
    order: str = ""
    labels: list[str] = []


def _first_of(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False)[0]
    return f"{'.'.join(str(part) for part in first['loc'])!r:.80}: {first['msg']:.120}"


def position_of(batch: StepBatch, samples: int) -> Position:
    """`samples`: of an epoch."""
    end = batch.after.consumed if batch.after.epoch == batch.epoch else samples
    return batch.epoch, end - batch.samples
