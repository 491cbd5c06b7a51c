"""Who holds up the run, or ended it, in one sentence: a function of what was seen of its ranks, and of nothing else."""

from __future__ import annotations

import re
import signal
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from shardwise.errors import one_line
from shardwise.watch.failures import RankError
from shardwise.watch.heartbeats import Beat, Phase
from shardwise.watch.stacks import NOWHERE, Stack


class Kind(StrEnum):
    HANG = "hang"
    """A rank does not come out of a place in the code."""
    PAUSED = "paused"
    """A process was stopped by a signal."""
    MISMATCH = "mismatch"
    """The ranks wait in different collectives."""
    LOST = "lost"
    """Every rank that is seen waits for one that is not: a machine or a link is gone."""
    ERROR = "error"
    KILLED = "killed"
    MEMORY = "memory"
    CRASH = "crash"
    SILENT = "silent"
    """Ended, and left no word."""


@dataclass(frozen=True)
class Sighting:
    """What is known of one rank."""

    rank: int
    beat: Beat | None = None
    stack: Stack = NOWHERE
    state: str = "S"
    """Of the process, as the kernel writes it."""
    busy: bool = False
    """It used the processor while it was looked at."""
    exit_code: int | None = None
    died_at: float = 0.0
    """When its end was noticed, by the wall clock."""
    error: RankError | None = None
    memory: str | None = None
    """What the kernel says about killing it because memory ran out."""


@dataclass(frozen=True)
class Verdict:
    kind: Kind
    sentence: str
    guilty: tuple[int, ...]
    step: int | None = None
    """The step that the guilty rank was at."""


def verdict_on(seen: Sequence[Sighting], world: int, now: float) -> Verdict:
    """`now` is of the clock that beats are made with."""
    seen = sorted(seen, key=lambda each: each.rank)
    if any(each.exit_code or each.error for each in seen):
        return _on_the_dead(seen, world)
    return _on_the_silent(seen, world, now)


# ---------------------------------------------------------------- those that ended


def _on_the_dead(seen: list[Sighting], world: int) -> Verdict:
    first = _first_cause(seen)
    if first is None:
        left = [each.rank for each in seen if each.error]
        rest = sorted(set(range(world)) - set(left))
        sentence = f"{ranks(left)} lost the connection to {ranks(rest) if rest else 'each other'}" + (
            ", whose machine or link is gone" if rest else ", and none of them says why"
        )
        return Verdict(Kind.LOST, sentence, tuple(rest), _step(seen[0]))
    rank, code, error = first.rank, first.exit_code, first.error
    where = _where(first)
    if error is not None and not error.peer_lost:
        words = error.message if error.for_user else f"{one_line(error.message)}{_raised_at(error)}"
        return Verdict(Kind.ERROR, f"rank {rank} failed{where}: {words}", (rank,), _step(first))
    if first.memory:
        sentence = f"rank {rank} was killed by the kernel{where}, because memory ran out ({first.memory})"
        return Verdict(Kind.MEMORY, sentence, (rank,), _step(first))
    if code == -signal.SIGKILL:
        sentence = (
            f"rank {rank} was killed by SIGKILL{where}, and the kernel says nothing of memory, so somebody did it"
        )
        return Verdict(Kind.KILLED, sentence, (rank,), _step(first))
    if code == -signal.SIGABRT and (elsewhere := _elsewhere(first, seen)):
        # gloo aborts the process when what arrives has another size than what is waited for (torch 2.13).
        sentence = (
            f"rank {rank} broke off (SIGABRT){where}, while "
            + ", ".join(f"rank {each.rank} was{_where(each)}" for each in elsewhere)
            + ": the ranks do not make the same collectives in the same order"
        )
        return Verdict(Kind.MISMATCH, sentence, (rank, *(each.rank for each in elsewhere)), _step(first))
    if code is not None and code < 0:
        name = _signal_name(-code)
        place = f" at {first.stack.place.place}" if first.stack.place and -code in _CRASHES else ""
        kind = Kind.CRASH if -code in _CRASHES else Kind.KILLED
        verb = "crashed with" if -code in _CRASHES else "was ended by"
        return Verdict(kind, f"rank {rank} {verb} {name}{where}{place}", (rank,), _step(first))
    sentence = f"rank {rank} ended without a word{where}, exit code {code}"
    return Verdict(Kind.SILENT, sentence, (rank,), _step(first))


def _elsewhere(first: Sighting, seen: list[Sighting]) -> list[Sighting]:
    """The ranks that were not where this one was, if it was where ranks meet."""
    own = first.beat
    if own is None or own.phase is not Phase.AGREE:
        return []
    beats = [(each, each.beat) for each in seen if each.beat is not None and each is not first]
    return [each for each, beat in beats if (beat.step, beat.phase) != (own.step, own.phase)]


_CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}


def _first_cause(seen: list[Sighting]) -> Sighting | None:
    """The first that did not merely lose another rank."""
    real = [each for each in seen if each.error and not each.error.peer_lost]
    wordless = [each for each in seen if each.exit_code and not each.error]
    first_real = min(real, key=lambda each: each.error.when if each.error else 0.0, default=None)
    first_wordless = min(wordless, key=lambda each: each.died_at, default=None)
    if first_real is None or first_wordless is None:
        return first_real or first_wordless
    # An end is noticed a little after it happened, an error is written down at once. Whoever raised because another was
    # gone, with words that are not known as such, did so after that end.
    raised = first_real.error.when if first_real.error else 0.0
    return first_real if raised < first_wordless.died_at - 1.0 else first_wordless


def _raised_at(error: RankError) -> str:
    places = re.findall(r'File "([^"]+)", line (\d+), in', error.trace)
    own = [(file, line) for file, line in places if "/torch/" not in file]
    return f" ({'/'.join(own[-1][0].split('/')[-2:])}:{own[-1][1]})" if own else ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _where(each: Sighting) -> str:
    beat = each.beat
    if beat is None:
        return " before it had begun"
    if beat.phase.startup:
        return f" in {beat.phase.words}" if beat.phase is Phase.START else f" while {beat.phase.words}"
    return f" in step {beat.step} ({beat.phase.words})"


# ---------------------------------------------------------------- those that hang


def _on_the_silent(seen: list[Sighting], world: int, now: float) -> Verdict:
    paused = [each for each in seen if each.state in ("T", "t")]
    ended = [each for each in seen if each.state in ("", "Z")]
    waiting = [each for each in seen if each not in paused and each not in ended and _waits_in(each)]
    busy = [each for each in seen if each not in paused and each not in ended and each not in waiting]
    done = [each for each in busy if each.beat and each.beat.phase is Phase.END]
    busy = [each for each in busy if each not in done] or ([] if waiting else done)
    about_waiting = _those_who_wait(waiting)
    for guilty, kind in ((ended, Kind.SILENT), (paused, Kind.PAUSED), (busy, Kind.HANG)):
        if guilty:
            said = [*_each(guilty, kind, now), *about_waiting]
            return Verdict(kind, "; ".join(said), tuple(each.rank for each in guilty), _step(guilty[0]))
    if done:
        names = [each.rank for each in done]
        ahead = f"{ranks(names)} {'has' if len(names) == 1 else 'have'} come to the end"
        sentence = f"{'; '.join([ahead, *about_waiting])}: all ranks must take the same branch"
        return Verdict(Kind.MISMATCH, sentence, tuple(names), _step(done[0]))
    groups = _groups(waiting)
    if len(groups) > 1:
        return _on_a_mismatch(groups)
    missing = sorted(set(range(world)) - {each.rank for each in seen})
    step = _step(waiting[0]) if waiting else None
    if missing:
        sentence = (
            f"{'; '.join(about_waiting)} for {ranks(missing)}, of which nothing is seen here: the machine, or the link to it, "
            "is lost or hangs"
        )
        return Verdict(Kind.LOST, sentence, tuple(missing), step)
    sentence = f"{'; '.join(about_waiting)}, and none of them is late: the link between them is cut or stuck"
    return Verdict(Kind.LOST, sentence, (), step)


def _waits_in(each: Sighting) -> str | None:
    """What a rank waits for the others in, if it does."""
    if each.stack.collective:
        return each.stack.collective
    if each.stack.in_backward and not each.busy:
        return "the reduction of gradients"
    if each.stack.in_exchange and not each.busy:
        return "an exchange"
    # On a GPU the host goes ahead and waits where it needs a number; its device waits for the others' meanwhile.
    own = each.stack.frames[0] if each.stack.frames else None
    if own is not None and own.is_ours and not own.is_users and each.beat and each.beat.phase in _ON_THE_DEVICE:
        return "the work of its device"
    return None


_ON_THE_DEVICE = (Phase.COMPUTE, Phase.UPDATE)


def _each(guilty: list[Sighting], kind: Kind, now: float) -> Iterable[str]:
    for each in guilty:
        beat = each.beat
        since = f" for {now - beat.since:.0f} s" if beat else ""
        if kind is Kind.PAUSED:
            yield f"rank {each.rank} was stopped by a signal (SIGSTOP or Ctrl-Z){_where(each)} and stands still{since}"
        elif kind is Kind.SILENT:
            yield f"rank {each.rank} is gone{_where(each)}"
        else:
            place = f" ({each.stack.place.place})" if each.stack.place else ""
            disk = ", in a disk wait of the kernel" if each.state == "D" else ""
            yield f"rank {each.rank} is in {_doing(beat)}{place}{since}{disk}"


def _doing(beat: Beat | None) -> str:
    if beat is None:
        return "start-up"
    words = {Phase.COMPUTE: "the computation", Phase.DATA: "reading data", Phase.AGREE: "the agreement"}
    name = words.get(beat.phase, beat.phase.words)
    return name if beat.phase.startup or beat.phase in (Phase.EVALUATE, Phase.END) else f"{name} of step {beat.step}"


def _those_who_wait(waiting: list[Sighting]) -> list[str]:
    return [f"{ranks([each.rank for each in group])} {_wait(group)} in {name}" for name, group in _groups(waiting)]


def _groups(waiting: list[Sighting]) -> list[tuple[str, list[Sighting]]]:
    """By what they wait in, and for which step; those further ahead last."""
    by: dict[tuple[int, int, str], list[Sighting]] = defaultdict(list)
    for each in waiting:
        beat = each.beat
        by[(beat.step if beat else 0, beat.phase if beat else 0, _waits_in(each) or "")].append(each)
    return [(f"{name}{_of(phase, step)}", group) for (step, phase, name), group in sorted(by.items())]


def _of(phase: int, step: int) -> str:
    known = Phase(phase)
    if known.startup:
        return f" of {known.words}" if known is Phase.START else f" while {known.words}"
    if known is Phase.EVALUATE:
        return " of evaluation"
    return f" of step {step}" + (" (saving)" if known is Phase.SAVE else "")


def _on_a_mismatch(groups: list[tuple[str, list[Sighting]]]) -> Verdict:
    """The ranks took different branches. The odd ones are the fewest; of equally many, those who called from the user's code;
    else those further ahead."""
    odd = max((group for _, group in reversed(groups)), key=lambda group: (-len(group), _calls_itself(group[0])))
    said = []
    for name, group in groups:
        place = group[0].stack.innermost_own
        said.append(
            f"{ranks([each.rank for each in group])} {_wait(group)} in {name}{f' ({place.place})' if place else ''}"
        )
    behind = next(name for name, group in groups if group is not odd)
    names = [each.rank for each in odd]
    sentence = (
        f"the ranks wait in different collectives: {'; '.join(said)}. {ranks(names).capitalize()} "
        f"{'is' if len(names) == 1 else 'are'} not in {behind}, where the others are: all ranks must take the same branch"
    )
    return Verdict(Kind.MISMATCH, sentence, tuple(names), _step(odd[0]))


def _calls_itself(each: Sighting) -> bool:
    place = each.stack.innermost_own
    return place is not None and place.is_users


def _wait(group: list[Sighting]) -> str:
    return "waits" if len(group) == 1 else "wait"


def _step(each: Sighting) -> int | None:
    return each.beat.step if each.beat else None


def ranks(numbers: Iterable[int]) -> str:
    """rank 1; ranks 0, 2, 3; ranks 0 to 7, 9."""
    ordered = sorted(numbers)
    runs: list[list[int]] = []
    for number in ordered:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    words = [f"{run[0]} to {run[-1]}" if len(run) > 3 else ", ".join(map(str, run)) for run in runs]
    return f"rank{'s' if len(ordered) != 1 else ''} {', '.join(words)}"
