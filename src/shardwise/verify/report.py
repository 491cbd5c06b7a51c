"""What a person sees: a table of checks in figures, and a paragraph for each failure."""

from __future__ import annotations

import json
import textwrap
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from shardwise.verify.causes import Cause

Group = Literal["parity", "coverage", "evaluation", "resume", "agreement"]
CheckStatus = Literal["pass", "FAIL", "not proved", "note"]
Answer = Literal["pass", "fail", "not proved"]
EXIT_CODES: dict[Answer, int] = {"pass": 0, "fail": 1, "not proved": 3}
"""2 is an error: it could not be tried."""

_COUNTED: dict[CheckStatus, str] = {"pass": "passed", "FAIL": "failed", "not proved": "not proved", "note": "noted"}
# In the order of Cause these come after everything that brings them about.
_CONSEQUENCES = {
    Cause.RANK_FAILED,
    Cause.EVALUATION_FAILS,
    Cause.CLIP_NORM,
    Cause.REPORTED_LOSS,
    Cause.SOME_RANKS_UPDATE,
    Cause.DRIFT,
    Cause.NOT_DETERMINISTIC,
    Cause.WEIGHTS_NOT_RESTORED,
    Cause.OTHER_RANKS,
}


@dataclass(frozen=True)
class Finding:
    """Why a check failed, as far as the experiments tell."""

    cause: Cause
    what: str
    """What differs, by how much, where: module, parameter, rank, step."""
    parameter: str | None = None
    rank: int | None = None
    step: int | None = None
    amount: float | None = None

    def as_dict(self) -> dict[str, Any]:
        text = self.cause.value
        return {**vars(self), "cause": self.cause.name.lower(), "means": text.means, "look_at": text.look_at}


@dataclass(frozen=True)
class Check:
    group: Group
    name: str
    status: CheckStatus
    detail: str
    finding: Finding | None = None
    why: str = ""
    """Why it is not proved, and what would prove it."""

    @property
    def told(self) -> str:
        return f"{self.detail}. {self.why}" if self.why else self.detail


def passed(group: Group, name: str, detail: str) -> Check:
    return Check(group, name, "pass", detail)


def unproved(group: Group, name: str, detail: str, why: str) -> Check:
    """Nothing is wrong as far as can be seen, and too little can be seen."""
    return Check(group, name, "not proved", detail, why=why)


def noted(group: Group, name: str, detail: str) -> Check:
    return Check(group, name, "note", detail)


def failed(group: Group, name: str, finding: Finding) -> Check:
    return Check(group, name, "FAIL", finding.what, finding)


@dataclass
class Report:
    about: list[str]
    """What was compared with what."""
    checks: list[Check] = field(default_factory=list)
    not_looked_at: list[str] = field(default_factory=list)
    """What this report says nothing about."""
    seconds: float = 0.0

    def allow_unequal(self, strategy: str, sentence: str) -> None:
        """`sentence`: what the numbers of this strategy are not equal to. Differences in them are then noted, not failed: of
        gradients, losses and weights, and of the curve on another number of ranks."""
        if not sentence:
            return
        numbers = ("gradient", "loss", "weights", "resumed on")
        self.checks = [
            replace(each, status="note", finding=None)
            if each.status == "FAIL" and each.name.startswith(numbers)
            else each
            for each in self.checks
        ]
        self.checks.insert(0, noted("parity", f"strategy {strategy}", sentence))

    @property
    def answer(self) -> Answer:
        if self.failures:
            return "fail"
        return "not proved" if self._count("not proved") else "pass"

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.answer]

    @property
    def passed(self) -> bool:
        """Everything that was looked at is proved."""
        return self.answer == "pass"

    def _count(self, status: CheckStatus) -> int:
        return sum(check.status == status for check in self.checks)

    @property
    def failures(self) -> list[Check]:
        return [check for check in self.checks if check.status == "FAIL"]

    @property
    def findings(self) -> list[Finding]:
        """The most fundamental first, without those that follow from it."""
        return [finding for _, finding in self._sorted() if not self._follows(finding)]

    @property
    def followers(self) -> list[str]:
        """Checks that fail because of what was found before them."""
        return [check.name for check, finding in self._sorted() if self._follows(finding)]

    def _sorted(self) -> list[tuple[Check, Finding]]:
        order = list(Cause)
        found = [(check, check.finding) for check in self.failures if check.finding]
        return sorted(found, key=lambda pair: order.index(pair[1].cause))

    def _follows(self, finding: Finding) -> bool:
        """A wrong gradient makes wrong norms, losses and weights; ranks that differ cannot be brought back by rank 0's."""
        order = list(Cause)
        first = min((order.index(f.cause) for _, f in self._sorted()), default=0)
        return finding.cause in _CONSEQUENCES and first < min(order.index(cause) for cause in _CONSEQUENCES)

    @property
    def causes(self) -> list[Cause]:
        return list(dict.fromkeys(finding.cause for finding in self.findings))

    def as_dict(self) -> dict[str, Any]:
        return {
            "answer": self.answer,
            "exit_code": self.exit_code,
            "passed": self.passed,
            "seconds": round(self.seconds, 1),
            "about": self.about,
            "checks": [
                {
                    "group": check.group,
                    "name": check.name,
                    "verdict": check.status.lower(),
                    "detail": check.detail,
                    "why": check.why,
                    "finding": check.finding.as_dict() if check.finding else None,
                }
                for check in self.checks
            ],
            "causes": [cause.name.lower() for cause in self.causes],
            "followers": self.followers,
            "not_looked_at": self.not_looked_at,
        }

    def as_json(self) -> str:
        return json.dumps(self.as_dict(), indent=1)

    def as_text(self) -> str:
        lines = [*self.about, ""]
        width = max((len(check.name) for check in self.checks), default=0)
        status = max((len(check.status) for check in self.checks), default=0)
        group = ""
        for check in self.checks:
            head = check.group if check.group != group else ""
            group = check.group
            indent = " " * (12 + width + 2 + status + 2)
            detail = textwrap.wrap(check.told, max(40, 128 - len(indent)))
            lines.append(
                f"{head:<11} {check.name:<{width}}  {check.status:<{status}}  {detail[0] if detail else ''}".rstrip()
            )
            lines += [f"{indent}{line}" for line in detail[1:]]
        for cause in self.causes:
            lines += ["", *self._paragraph(cause)]
        if self.followers:
            lines += [
                "",
                *textwrap.wrap(f"What follows from it, probably: {', '.join(dict.fromkeys(self.followers))}.", 120),
            ]
        if self.not_looked_at:
            lines += ["", "Not looked at:"]
            lines += [
                line
                for each in self.not_looked_at
                for line in textwrap.wrap(each, 118, initial_indent="- ", subsequent_indent="  ")
            ]
        counts = ", ".join(f"{self._count(kind)} {said}" for kind, said in _COUNTED.items())
        lines += ["", f"{self.answer.upper()}: {counts} in {self.seconds:.0f} s"]
        return "\n".join(lines)

    def _paragraph(self, cause: Cause) -> list[str]:
        seen = list(dict.fromkeys(finding.what for finding in self.findings if finding.cause is cause))
        first = cause is self.causes[0]
        head = f"{'Likely cause' if first else 'Also'}: {cause.value.means}."
        return [
            *textwrap.wrap(head, 120),
            *(line for what in seen for line in _wrapped(what)),
            *_wrapped(f"Look at {cause.value.look_at}."),
        ]


def _wrapped(text: str) -> list[str]:
    """Lines of a stack stay as they are."""
    return [
        line
        for part in text.splitlines()
        for line in textwrap.wrap(part, 118, initial_indent="  ", subsequent_indent="  ")
    ]
