"""What a step came to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from shardwise.engine.loss_guard import BadLoss, Decision


@dataclass
class StepResult:
    """On a GPU, its numbers are known when the device has made it: who asks for them waits."""

    step: int
    """Number of this step, from 1, as in the log."""
    stopped: bool = False
    """A rank asked to stop, so all left this step undone."""
    skipped: bool = False
    """The numbers were bad, so no weight was changed."""
    decision: Decision | None = None
    """What was bad, where that is more than how fp16 finds its loss scale, and what is done about it."""
    trouble: str = ""
    """What was bad and on which samples, in a sentence."""
    bad_loss: BadLoss | None = None
    """This rank's loss was not finite, which the others learn at the next step."""
    loss: float | None = None
    """Of all ranks, where it is watched before the update (see loss_guard.py)."""
    count: int = 0
    global_count: int = 0
    lr: float = 0.0
    samples: int = 0
    """Of all ranks."""
    times: dict[str, float] = field(default_factory=dict)
    """Seconds in each phase: wait for data, agree, compute, update; of compute, this rank's own forward passes, and in a
    pipeline, idle."""

    numbers: tuple[float, float] = (0.0, 0.0)
    """The gradient's norm and this rank's summed loss, as far as they are known."""
    device_idle: bool | None = None
    """The device had made this step before the host had prepared the next. None: not known, because somebody asked for its
    numbers and made the host wait."""
    awaited: Callable[[], bool] | None = None
    """Waits for the device, and fills in what only it knows. Whether the device had been done before."""

    @property
    def grad_norm(self) -> float:
        """Over all ranks, before clipping."""
        return self.wait().numbers[0]

    @property
    def loss_sum(self) -> float:
        """Of this rank. Session.loss reduces it over all ranks."""
        return self.wait().numbers[1]

    def wait(self, *, in_turn: bool = False) -> StepResult:
        """Until the device has made this step. All ranks call it together; it says if the numbers are bad. `in_turn`: the host
        has prepared the next step, and now it shows who waited for whom."""
        if self.awaited is not None:
            awaited, self.awaited = self.awaited, None
            done_before = awaited()
            self.device_idle = done_before if in_turn else None
        return self

    @property
    def rollback(self) -> bool:
        """The run goes back to its last checkpoint."""
        return self.decision is not None and self.decision.act == "rollback"
