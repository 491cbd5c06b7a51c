"""Whether a run with faults came to the end that an undisturbed one does: weights, metrics, samples."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardwise.checkpoint import CheckpointStore
from shardwise.checkpoint.inspect import condition_of_checkpoint
from shardwise.data.manifest import read_manifest

Records = Sequence[dict[str, Any]]


def differences(whole: Path, torn: Path, of_whole: Records, of_torn: Records) -> list[str]:
    """Every difference in a sentence; none: nothing was lost."""
    return [*_weights(whole, torn), *_metrics(whole, torn), *_samples(of_whole, of_torn)]


def _weights(whole: Path, torn: Path) -> list[str]:
    """The last checkpoint holds weights and moments: every bit of it."""
    newest = [CheckpointStore(folder / "run" / "checkpoints").every() for folder in (whole, torn)]
    if not all(newest):
        return ["there is no last checkpoint"]
    expected, found = newest[0][-1], newest[1][-1]
    if expected.step != found.step:
        return [f"the run ended at step {found.step} instead of {expected.step}"]
    if problems := condition_of_checkpoint(found.path).problems:
        return [f"the last checkpoint is damaged: {'; '.join(problems)}"]
    files, others = (read_manifest(each.path)["files"] for each in (expected, found))
    different = sorted(name for name in files.keys() | others.keys() if files.get(name) != others.get(name))
    return [f"weights or moments differ at the end: {', '.join(different)}"] if different else []


def _metrics(whole: Path, torn: Path) -> list[str]:
    expected, found = (_curve(folder / "run" / "metrics.jsonl") for folder in (whole, torn))
    twice = [step for step, number in Counter(step for step, _ in found).items() if number > 1]
    if twice:
        return [f"metrics.jsonl has {twice[0]} twice"]
    different = [step for step, value in expected if dict(found).get(step) != value]
    if different or len(found) != len(expected):
        return [f"metrics differ, first at {different[0] if different else 'the end'}"]
    return []


def _curve(file: Path) -> list[tuple[str, Any]]:
    records = [json.loads(line) for line in file.read_text().splitlines()]
    return [
        (f"the evaluation of step {each['step']}", each["eval"])
        if "eval" in each
        else (f"step {each['step']}", (each["loss"], each["grad_norm"], each["lr"]))
        for each in records
    ]


def _samples(of_whole: Records, of_torn: Records) -> list[str]:
    """What counts is how a step was made the last time: what came before was undone."""
    expected, found = _used(of_whole), _used(of_torn)
    different = [step for step in expected if expected[step] != found.get(step)]
    if different:
        return [f"step {different[0]} used other samples"]
    by_epoch: dict[int, Counter[int]] = {}
    for epoch, ids in found.values():
        by_epoch.setdefault(epoch, Counter()).update(ids)
    repeated = [(epoch, sample) for epoch, used in by_epoch.items() for sample, number in used.items() if number > 1]
    return [f"epoch {repeated[0][0]} used sample {repeated[0][1]} twice"] if repeated else []


def _used(records: Records) -> dict[int, tuple[int, list[int]]]:
    """By step: its epoch and the samples of all ranks."""
    last: dict[tuple[int, int], dict[str, Any]] = {}
    for record in records:
        if record["what"] == "stepped":
            last[record["step"], record["rank"]] = record
    steps: dict[int, tuple[int, list[int]]] = {}
    for (step, _), record in sorted(last.items()):
        _, ids = steps.get(step, (0, []))
        steps[step] = record["epoch"], sorted([*ids, *record["ids"]])
    return steps
