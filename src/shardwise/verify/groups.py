"""The runs of the proof, several at a time, and what each of them left behind."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.serialization import safe_globals

from shardwise.config import Batching
from shardwise.launch.group import RankGroup
from shardwise.verify.by_hand import History
from shardwise.verify.coverage import Coverage, Handed, Overlap
from shardwise.verify.probe import Probe, Share
from shardwise.verify.rank import rank
from shardwise.verify.run_spec import Plan, RunSpec
from shardwise.watch.diagnosis import Sighting, Verdict
from shardwise.watch.failures import RankError


@dataclass
class GroupResult:
    spec: RunSpec
    ranks: list[Sighting]
    """One that hung, and was ended for it, has no exit code."""
    hang: Verdict | None
    steps: list[list[dict[str, Any]]]
    """What each rank wrote down after each step."""
    _records: dict[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def fine(self) -> bool:
        return all(rank.exit_code == 0 for rank in self.ranks)

    @property
    def killed(self) -> bool:
        return any(rank.exit_code == -signal.SIGKILL for rank in self.ranks)

    def record(self, rank: int = 0) -> dict[str, Any]:
        if rank not in self._records:
            with safe_globals(
                [Batching, Coverage, Handed, History, Overlap, Plan, Probe, Share]
            ):  # and tensors and plain data
                self._records[rank] = torch.load(self.spec.record(rank), weights_only=True)
        return self._records[rank]

    @property
    def records(self) -> list[dict[str, Any]]:
        return [self.record(rank) for rank in range(self.spec.world)]

    def first_error(self) -> RankError | None:
        """The first that is not merely the loss of another rank."""
        errors = sorted((rank.error for rank in self.ranks if rank.error), key=lambda error: error.when)
        return next((error for error in errors if not error.peer_lost), errors[0] if errors else None)


def run_groups(specs: Iterable[RunSpec], at_once: int, *, hang_timeout: float) -> dict[str, GroupResult]:
    """As many at a time as fit into `at_once` processes; by name."""
    waiting = list(specs)
    running: list[tuple[RunSpec, RankGroup]] = []
    done: dict[str, GroupResult] = {}
    try:
        while waiting or running:
            while waiting and (not running or sum(spec.world for spec, _ in running) + waiting[0].world <= at_once):
                running.append((waiting[0], _started(waiting.pop(0), hang_timeout)))
            time.sleep(0.02)
            for spec, group in [each for each in running if each[1].ended()]:
                running.remove((spec, group))
                done[spec.name] = _result(spec, group)
    finally:
        for _, group in running:
            group.end()
    return done


class Background:
    """A group that runs beside the others."""

    def __init__(self, spec: RunSpec, hang_timeout: float) -> None:
        self.spec, self._group = spec, _started(spec, hang_timeout)

    def result(self) -> GroupResult:
        """When it has ended."""
        while not self._group.ended():
            time.sleep(0.02)
        return _result(self.spec, self._group)

    def end(self) -> None:
        self._group.end()


def _result(spec: RunSpec, group: RankGroup) -> GroupResult:
    steps = [_steps(spec, rank) for rank in range(spec.world)]
    return GroupResult(spec, group.sightings(), group.hang, steps)


def _started(spec: RunSpec, hang_timeout: float) -> RankGroup:
    # Collectives that do not match are named, instead of hanging or returning rubbish; it costs time, so once is enough.
    debug = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "TORCH_CPP_LOG_LEVEL": "ERROR"} if spec.watched else {}
    seeds = [each.hash_seed for each in spec.interpreters]
    return RankGroup(rank, (spec,), spec.world, spec.folder, hang_timeout, debug, seeds)


def _steps(spec: RunSpec, rank: int) -> list[dict[str, Any]]:
    """A line that a kill has cut is no step."""
    file = spec.steps_file(rank)
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]
