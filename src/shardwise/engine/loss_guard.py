"""Numbers gone bad: what counts as bad, what is to be done about it, and which samples were to blame.

Every rank comes to the same decision: it is made of the gradient's global norm and the loss of all ranks.
"""

from __future__ import annotations

import json
import logging
import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from shardwise.config import Training
from shardwise.engine.parts import Parts
from shardwise.errors import LossSpike, NonFiniteError, ShardwiseError

log = logging.getLogger(__name__)

BAD_SAMPLES = "bad-samples.jsonl"
"""In the run folder: one line per rank and bad step."""
HISTORY = 100
ENOUGH = 20
"""Losses without which none is called unusual."""
LEAST_DEVIATION = 0.01
"""As a share of the median: on a flat curve any other loss would be many deviations away."""

What = Literal["nonfinite", "spike"]
Act = Literal["stop", "skip", "rollback"]


@dataclass(frozen=True)
class BadLoss:
    """A rank's part of a bad step. Its samples are those of the micro-batches whose own loss was bad, or all."""

    step: int
    epoch: int
    rank: int
    loss: float | None
    """The rank's own, per count; None where it counted nothing."""
    samples: list[int]
    guilty: bool
    """Its own loss was bad. Where nobody's was, the gradient overflowed on the way back."""


@dataclass(frozen=True)
class Decision:
    what: What
    act: Act
    limit: float = math.inf
    """A spike's: what the loss would have had to stay below."""


class LossHistory:
    """Those of the last steps, over all ranks, to tell a spike by."""

    def __init__(self, recent: Iterable[float] = ()) -> None:
        self.recent = deque(recent, maxlen=HISTORY)

    def add(self, loss: float) -> None:
        self.recent.append(loss)

    def limit(self, factor: float) -> float:
        """Median and median deviation: spikes that came before hardly move them, as they would a mean."""
        if len(self.recent) < ENOUGH:
            return math.inf
        median = statistics.median(self.recent)
        deviation = statistics.median(abs(loss - median) for loss in self.recent)
        return median + factor * max(deviation, LEAST_DEVIATION * abs(median))


def judge(training: Training, norm: float, loss: float | None, losses: LossHistory, *, scaled: bool) -> Decision | None:
    """`loss`: of all ranks, where it is watched. `scaled`: under fp16, where an overflow is how the loss scale is found."""
    overflow = not math.isfinite(norm)
    lost = loss is not None and not math.isfinite(loss)
    if lost and training.on_nonfinite != "skip":
        return Decision("nonfinite", training.on_nonfinite)
    if overflow and not scaled:
        return Decision("nonfinite", training.on_nonfinite)
    if training.on_spike != "ignore" and loss is not None:
        limit = losses.limit(training.spike_factor)
        if lost or loss > limit:
            return Decision("spike", training.on_spike, limit)
    return None


def blame(parts: Parts, decision: Decision, mine: BadLoss) -> list[BadLoss]:
    """Every rank comes here together. The samples to blame are written down, and known to all."""
    everyone = [BadLoss(**each) for each in parts.world.gather(asdict(mine))]
    blamed = [bad_loss for bad_loss in everyone if bad_loss.guilty] or everyone
    blamed = [bad_loss for bad_loss in blamed if bad_loss.samples]
    if parts.world.is_first:
        _write_down(Path(parts.config.run_folder), decision, blamed)
    return blamed


def nonfinite_before(parts: Parts, step: int, bad: BadLoss | None) -> ShardwiseError:
    """The loss of the step before was not finite on some rank, and its gradient did not show it. Every rank comes here."""
    decision = Decision("nonfinite", "stop")
    mine = bad or BadLoss(step, 0, parts.world.rank, None, [], guilty=False)
    return stop_because(step, decision, blame(parts, decision, mine))


def what_happened(decision: Decision, blamed: Sequence[BadLoss]) -> str:
    who = "; ".join(f"rank {bad_loss.rank}, samples {brief(bad_loss.samples)}" for bad_loss in blamed)
    if decision.what == "spike":
        losses = ", ".join(f"{bad_loss.loss:.4g}" for bad_loss in blamed if bad_loss.loss is not None)
        return f"the loss jumped to {losses}, above {decision.limit:.4g}, on {who}"
    if any(bad_loss.guilty for bad_loss in blamed):
        return f"the loss is not finite on {who}"
    return f"the gradient is not finite although the loss is, so it overflowed on the way back ({who})"


def stop_because(step: int, decision: Decision, blamed: Sequence[BadLoss], *, why: str = "") -> ShardwiseError:
    """The error that ends the run. `why`: what else kept it from going on."""
    said = f"step {step}: {what_happened(decision, blamed)}.{why}\n  "
    if decision.what == "spike":
        return LossSpike(
            f"{said}Look at those samples, lower training.optimizer.lr, set training.gradient_clip; training.on_spike: skip or "
            "rollback goes on without them, and a larger training.spike_factor calls less a spike"
        )
    return NonFiniteError(
        f"{said}Look at those samples, lower training.optimizer.lr, set training.gradient_clip, or set "
        "training.on_nonfinite: skip to leave such steps out, rollback to go back to the last checkpoint and leave them out"
    )


def brief(names: Sequence[int | str]) -> str:
    return ", ".join(map(str, names[:16])) + (f" and {len(names) - 16} more" if len(names) > 16 else "")


def _write_down(folder: Path, decision: Decision, blamed: Sequence[BadLoss]) -> None:
    """Bad numbers are bad enough: a disk that cannot be written to does not end the run here."""
    bad = "loss" if any(bad_loss.guilty for bad_loss in blamed) else "gradient"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / BAD_SAMPLES).open("a") as file:
            for bad_loss in blamed:
                record = {"what": "spike" if decision.what == "spike" else bad, "did": decision.act, **asdict(bad_loss)}
                del record["guilty"]
                # JSON knows no infinity: as text it is one that every reader takes.
                if bad_loss.loss is not None and not math.isfinite(bad_loss.loss):
                    record["loss"] = str(bad_loss.loss)
                file.write(json.dumps(record) + "\n")
    except OSError as error:
        log.warning(f"{folder / BAD_SAMPLES} cannot be written: {error.strerror}")
