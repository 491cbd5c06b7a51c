"""What a drill found, for people and for machines."""

from __future__ import annotations

import statistics
from dataclasses import asdict
from typing import Any

from shardwise.drill.conduct import Recovery, Result
from shardwise.drill.faults import Kind


def as_table(result: Result) -> str:
    """Markdown."""
    lines = [
        "| fault | times | went on after: median (longest) | noticed | processes | resumed | steps again: median (most) |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind in Kind:
        own = [each for each in result.recoveries if each.fault.kind is kind]
        if not own:
            continue
        if not kind.fatal:
            lines.append(f"| {kind.words} | {len(own)} | training went on | | | | 0 |")
            continue
        seconds, steps = [each.seconds for each in own], [each.steps_again for each in own]
        lines.append(
            f"| {kind.words} | {len(own)} | {_median(seconds):.1f} s ({max(seconds):.1f} s) | "
            f"{_median([e.noticed for e in own]):.1f} s | {_median([e.started for e in own]):.1f} s | "
            f"{_median([e.resumed for e in own]):.1f} s | {_median(steps):.0f} ({max(steps)}) |"
        )
    return "\n".join(lines)


def as_words(result: Result) -> str:
    fatal = _fatal(result)
    lines = [f"faults survived      {len(result.recoveries)}, in {result.rounds} run(s)"]
    if fatal:
        seconds = [each.seconds for each in fatal]
        lines += [
            f"went on after        {_median(seconds):.1f} s (median), {max(seconds):.1f} s at most; of which noticing, preparing "
            f"and loading {_median([each.ours for each in fatal]):.1f} s (median)",
            f"work lost per fault  {_median([each.steps_again for each in fatal]):.0f} step(s) made again (median), "
            f"{max(each.steps_again for each in fatal)} at most",
        ]
    lines.append(
        f"goodput              {result.goodput:.0%}: the time that undisturbed runs take, of the time that these took"
    )
    if result.problems:
        lines += ["LOST:", *(f"  {problem}" for problem in result.problems)]
    else:
        lines.append(
            "nothing was lost: weights, moments, metrics and samples are those of the undisturbed run, bit for bit"
        )
    return "\n".join(lines)


def as_data(result: Result, seed: int) -> dict[str, Any]:
    fatal = _fatal(result)
    return {
        "seed": seed,
        "faults": len(result.recoveries),
        "rounds": result.rounds,
        "seconds": result.seconds,
        "goodput": result.goodput,
        "recovery_seconds_median": _median([each.seconds for each in fatal]) if fatal else None,
        "our_seconds_median": _median([each.ours for each in fatal]) if fatal else None,
        "problems": result.problems,
        "recoveries": [asdict(each) | {"seconds": each.seconds} for each in result.recoveries],
    }


def _fatal(result: Result) -> list[Recovery]:
    return [each for each in result.recoveries if each.fault.kind.fatal]


def _median(values: list[float] | list[int]) -> float:
    return float(statistics.median(values))
