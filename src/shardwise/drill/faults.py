"""What can go wrong, and when it will: the schedule follows from the seed, so that a failure can be played again."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum


class Kind(StrEnum):
    KILL = "kill"
    PAUSE = "pause"
    CRASH = "crash"
    ERROR = "error"
    HANG = "hang"
    SKIP = "skip"
    LAUNCHER = "launcher"
    SAVE = "save"
    CUT = "cut"
    FLIP = "flip"
    FULL = "full"
    SLOW = "slow"
    LINK = "link"

    @property
    def words(self) -> str:
        return WORDS[self]

    @property
    def fatal(self) -> bool:
        """Whether the ranks have to be started again."""
        return self not in (Kind.FULL, Kind.SLOW)

    @property
    def silent(self) -> bool:
        """Whether it shows by nothing but that nothing happens."""
        return self in (Kind.PAUSE, Kind.HANG, Kind.SKIP, Kind.LINK)

    @property
    def needs_two_machines(self) -> bool:
        return self is Kind.LINK


WORDS = {
    Kind.KILL: "SIGKILL of a rank",
    Kind.PAUSE: "SIGSTOP of a rank",
    Kind.CRASH: "SIGSEGV in a rank",
    Kind.ERROR: "an exception in a rank",
    Kind.HANG: "a rank that hangs",
    Kind.SKIP: "a collective that a rank skips",
    Kind.LAUNCHER: "SIGKILL of the launcher",
    Kind.SAVE: "SIGKILL while a checkpoint is written",
    Kind.CUT: "the newest checkpoint cut short, and SIGKILL",
    Kind.FLIP: "a flipped bit in the newest checkpoint, and SIGKILL",
    Kind.FULL: "a full disk at the next checkpoint",
    Kind.SLOW: "a rank slowed down",
    Kind.LINK: "the link between two machines cut",
}


@dataclass(frozen=True)
class Fault:
    number: int
    kind: Kind
    rank: int
    steps: int
    """How many steps the run makes after the last recovery before it comes."""
    moment: float
    """Where within a step, from 0 to 1; for files, where within the file."""


def schedule(seed: int, count: int, kinds: Sequence[Kind], world: int, saved_every: int) -> list[Fault]:
    """Every kind in turn, in a new order each time round, so that none is missing.

    They come up to two checkpoints apart: some before there is a new one, and yet the run gets on. Those that need two
    machines come last, because they are in runs of their own.
    """
    chance = random.Random(seed)
    faults: list[Fault] = []
    while len(faults) < count:
        for kind in chance.sample(list(kinds), len(kinds)):
            steps = chance.randint(1, 2 * saved_every)
            faults.append(Fault(len(faults), kind, chance.randrange(world), steps, chance.random()))
    in_order = sorted(faults[:count], key=lambda fault: fault.kind.needs_two_machines)
    return [replace(fault, number=number) for number, fault in enumerate(in_order)]
