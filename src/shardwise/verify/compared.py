"""What a comparison rests on: the runs of the ranks and of the reference, and how far rounding may bring them apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shardwise.verify.groups import GroupResult
from shardwise.verify.measure import Curve, Figures, Tolerance
from shardwise.verify.probe import Probe

ONE_PROCESS = "one process"


@dataclass
class Compared:
    """All that the comparison rests on."""

    probe: Probe
    ranks: GroupResult
    run: Figures
    """Of the ranks, put together."""
    reference: Figures
    """One process, or the other config."""
    start: dict[str, Tensor]
    """The weights before the first step, of the reference."""
    reference_record: dict[str, Any]
    tolerance: Tolerance
    split: bool
    """The reference computes the same micro-batches as the ranks, because splitting changes this model."""
    reference_name: str = ONE_PROCESS

    def gradient_limit(self, name: str) -> float:
        """What rounding explains."""
        return self.tolerance.gradients.get(name, self.tolerance.floor)

    def weight_limit(self, name: str, step: int) -> float:
        return self.tolerance.weights.get(step, {}).get(name, self.tolerance.floor)


def figures_of(group: GroupResult) -> Figures:
    """Parameters that only some ranks hold are taken from those."""
    gradients: dict[str, Tensor] = {}
    weights: dict[int, dict[str, Tensor]] = {}
    by_step: dict[int, dict[str, Tensor]] = {}
    for record in reversed(group.records):
        for step, found in record["gradients_by_step"].items():
            by_step.setdefault(step, {}).update(found)
        gradients |= record["gradients"]
        last = record["snapshots"]["end"]["steps_done"]
        for step, found in (record["weights_by_step"] | {last: record["weights"]}).items():
            weights.setdefault(step, {}).update(found)
    names = list(dict.fromkeys(name for record in group.records for name in record["initial"]))
    return Figures(
        Curve.of(group.steps),
        _sorted(gradients, names),
        {step: _sorted(found, names) for step, found in sorted(weights.items())},
        {step: _sorted(found, names) for step, found in sorted(by_step.items())},
    )


def _sorted(tensors: dict[str, Tensor], names: list[str]) -> dict[str, Tensor]:
    return {name: tensors[name] for name in names if name in tensors}
