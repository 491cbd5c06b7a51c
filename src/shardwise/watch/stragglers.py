"""Which rank is slower than the others, and by what: data, compute, or communication.

In synchronous training every rank's step takes equally long: the quick ones wait for the slow one. So a rank is judged by
what it does before it meets the others: how long it waits for data, how long its forward passes take, and how late it
comes to the agreement with which every step begins. A false alarm is worse than silence: only a rank that is slow by much,
by the same cause, in several windows in a row, is named, and once.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Literal

Cause = Literal["data", "compute", "communication"]

LEAST_STEPS = 10
"""Of a window: fewer say little."""
IN_A_ROW = 3
"""Windows in which a rank must be slow by the same cause."""
MUCH = 0.25
"""Slower than the others' data and compute together, by this share of them."""
NOTICEABLE = 0.005
"""Seconds per step. What is less is not worth anybody's time, and lost in the noise of a busy machine."""
OF_THE_STEP = 0.1
"""The share of every step that it must cost all the others."""


@dataclass(frozen=True)
class Pace:
    """One rank's seconds per step in a window. Medians, so that a pause for a checkpoint does not count; waiting for data
    comes in bursts, so that is a mean."""

    host: str
    data: float
    compute: float
    agree: float
    """Waiting for the others at the agreement: the last to come waits least."""
    step: float


@dataclass(frozen=True)
class Straggler:
    rank: int
    host: str
    cause: Cause
    seconds: float
    others: float
    """The median of the other ranks; for communication, seconds is how much later than they it comes."""
    step: float

    def sentence(self) -> str:
        mine, others = _ms(self.seconds), _ms(self.others)
        lost = f"{(self.seconds - self.others) / max(self.step, 1e-9):.0%} of every step of {_ms(self.step)}"
        what = {
            "data": f"it waits {mine} per step for its data, the others {others}",
            "compute": f"its forward passes take {mine} per step, the others' {others}",
            "communication": f"it comes {mine} later to every step than the others, by neither its data nor its forward passes",
        }[self.cause]
        who = f"rank {self.rank} ({self.host}) is slow by its {self.cause}"
        return f"{who}: {what}. All wait for it, {lost}. {_REMEDIES[self.cause]}"


_REMEDIES: dict[Cause, str] = {
    "data": "Look at what it reads from (a slow disk or mount), or raise data.num_workers",
    "compute": "Look at what else runs on that machine or GPU, and at its clocks and temperature (nvidia-smi -q -d "
    "PERFORMANCE,TEMPERATURE)",
    "communication": "Look at its network (link speed, which interface), and at what its process does between steps",
}


@dataclass
class Window:
    """What this rank measured since the last reading."""

    host: str = field(default_factory=platform.node)
    steps: list[Mapping[str, float]] = field(default_factory=list)

    def add(self, times: Mapping[str, float]) -> None:
        if "agree" in times:  # else nothing was computed
            self.steps.append(times)

    def read(self) -> Pace | None:
        """None while there are too few steps: they stay for the next reading."""
        if len(self.steps) < LEAST_STEPS:
            return None
        steps, self.steps = self.steps, []
        return Pace(
            host=self.host,
            data=fmean(times["wait"] for times in steps),
            compute=median(times.get("forward", 0.0) for times in steps),
            agree=median(times["agree"] for times in steps),
            step=median(
                sum(times.get(name, 0.0) for name in ("wait", "agree", "compute", "update")) for times in steps
            ),
        )


class Stragglers:
    def __init__(self) -> None:
        self._rows: dict[int, tuple[Cause, int]] = {}
        """How many windows in a row each rank has been slow, by what."""
        self._named: set[tuple[int, Cause]] = set()

    def judge(self, paces: Sequence[Pace | None]) -> list[Straggler]:
        """Every rank's pace of one window, in the order of ranks. Returns those that are to be named now."""
        whole = [pace for pace in paces if pace is not None]
        if len(whole) < max(2, len(paces)):
            return []
        found = []
        for rank, pace in enumerate(whole):
            slow = _slow(rank, pace, [other for each, other in enumerate(whole) if each != rank])
            if slow is None:
                self._rows.pop(rank, None)
                continue
            cause, row = self._rows.get(rank, (slow.cause, 0))
            self._rows[rank] = (slow.cause, row + 1 if cause == slow.cause else 1)
            if self._rows[rank][1] >= IN_A_ROW and (rank, slow.cause) not in self._named:
                self._named.add((rank, slow.cause))
                found.append(slow)
        return found


def _slow(rank: int, pace: Pace, others: list[Pace]) -> Straggler | None:
    """Compared with the median of the others: of two ranks, with the other."""
    data, compute = median(each.data for each in others), median(each.compute for each in others)
    # Late, but not because it waited for data: the forward pass comes after the agreement and cannot be the reason.
    late = median(each.agree for each in others) - pace.agree - max(0.0, pace.data - data)
    excess: dict[Cause, float] = {"data": pace.data - data, "compute": pace.compute - compute, "communication": late}
    cause = max(excess, key=lambda each: excess[each])
    own = median(each.data + each.compute for each in others)
    if excess[cause] <= max(MUCH * own, NOTICEABLE, OF_THE_STEP * pace.step):
        return None
    seconds: dict[Cause, tuple[float, float]] = {
        "data": (pace.data, data),
        "compute": (pace.compute, compute),
        "communication": (late, 0.0),
    }
    return Straggler(rank, pace.host, cause, *seconds[cause], step=pace.step)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
