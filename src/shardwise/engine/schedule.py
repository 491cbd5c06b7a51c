"""The learning rate as a function of the step alone, so there is nothing to save and nothing to forget."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardwise.config.schema import Scheduler


@dataclass(frozen=True)
class Schedule:
    options: Scheduler
    peak: float
    run_steps: int
    """Optimizer steps of the whole run."""

    @property
    def total_steps(self) -> int:
        return self.options.total_steps or self.run_steps

    @property
    def warmup_steps(self) -> int:
        if self.options.warmup_ratio is not None:
            return round(self.options.warmup_ratio * self.total_steps)
        return self.options.warmup_steps or 0

    def rate(self, step: int) -> float:
        """The rate of step 0, 1, 2, …: warmup begins above zero, or the first step would do nothing."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        if self.options.name == "constant":
            return self.peak
        length = max(1, self.total_steps - self.warmup_steps)
        done = min(1.0, (step - self.warmup_steps) / length)
        left = (1 + math.cos(math.pi * done)) / 2 if self.options.name == "cosine_warmup" else 1 - done
        floor = self.options.min_lr_ratio
        return self.peak * (floor + (1 - floor) * left)
