"""How long steps take: windows of several, with the device synchronised at both ends and left alone in between."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

KERNELS = 20
"""Listed of a contender."""


@dataclass(frozen=True)
class Plan:
    warmup: int
    windows: int
    steps: int
    """Of each window."""
    profile: bool = False
    """Whether one more window follows, in which kernels are listed. It is not timed."""

    @property
    def timed(self) -> int:
        """Steps up to the end of the last window that is timed."""
        return self.warmup + self.windows * self.steps

    @property
    def total(self) -> int:
        return self.timed + self.profile * self.steps


@dataclass(frozen=True)
class Figures:
    seconds_per_step: float
    """The median of the windows."""
    spread: float
    """Between the slowest and the fastest window, as a share of the median."""
    units_per_second: float
    """The median of the windows."""
    peak_gib: float | None
    """Allocated on the device, over all steps; the building of the model is left out."""
    peak_gib_timed: float | None
    """The same, warm-up left out."""
    build_seconds: float
    """Until the first step can begin: imports, model, optimizer."""
    first_step_seconds: float
    """Compilation included."""
    warmup_seconds: float
    windows: list[float]
    """Seconds of each."""
    losses: list[float]
    kernels: list[tuple[str, float]]
    """Where they were listed: those that take longest, with their seconds per step."""


@dataclass
class Meter:
    """A contender calls `ready` before its first step, and `done` after each."""

    plan: Plan
    device: torch.device
    losses: list[Tensor | float | Callable[[], float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._began = self._now()
        self._ready = self._window = self._began
        self._first_step = self._warmup = 0.0
        self._seconds: list[float] = []
        self._units: list[float] = [0.0]
        self._peaks: list[float] = []
        self._profiler: torch.profiler.profile | None = None
        self._kernels: list[tuple[str, float]] = []

    def ready(self) -> None:
        self._take_peak()
        self._peaks.clear()
        self._ready = self._now()

    def done(self, loss: Tensor | float | Callable[[], float], units: float) -> None:
        """The loss is not looked at, nor asked for, before the end: that would make the host wait for the device."""
        self.losses.append(loss.detach() if isinstance(loss, Tensor) else loss)
        steps = len(self.losses)
        if steps == 1:
            self._first_step = self._now() - self._ready
        if steps == self.plan.warmup:
            self._window = self._now()
            self._warmup = self._window - self._ready
            self._take_peak()
        if self.plan.profile:
            self._list_kernels(steps)
        if not self.plan.warmup < steps <= self.plan.timed:
            return
        self._units[-1] += units
        if (steps - self.plan.warmup) % self.plan.steps == 0:
            now = self._now()
            self._seconds.append(now - self._window)
            self._units.append(0.0)
            self._window = now

    def figures(self) -> Figures:
        if len(self.losses) != self.plan.total:
            raise RuntimeError(f"made {len(self.losses)} of {self.plan.total} steps")
        self._take_peak()
        seconds = statistics.median(self._seconds)
        rates = [units / elapsed for units, elapsed in zip(self._units, self._seconds, strict=False)]
        return Figures(
            seconds_per_step=seconds / self.plan.steps,
            spread=(max(self._seconds) - min(self._seconds)) / seconds,
            units_per_second=statistics.median(rates),
            peak_gib=max(self._peaks, default=None),
            peak_gib_timed=self._peaks[-1] if self._peaks else None,
            build_seconds=self._ready - self._began,
            first_step_seconds=self._first_step,
            warmup_seconds=self._warmup,
            windows=self._seconds,
            losses=[float(loss() if not isinstance(loss, Tensor) and callable(loss) else loss) for loss in self.losses],
            kernels=self._kernels,
        )

    def _list_kernels(self, steps: int) -> None:
        if steps == self.plan.timed:
            kind = (
                torch.profiler.ProfilerActivity.CUDA
                if self.device.type == "cuda"
                else torch.profiler.ProfilerActivity.CPU
            )
            self._profiler = torch.profiler.profile(activities=[kind])
            self._now()
            self._profiler.start()
        elif steps == self.plan.total and self._profiler is not None:
            self._now()
            self._profiler.stop()
            on_device = "self_device_time_total" if self.device.type == "cuda" else "self_cpu_time_total"
            found = [
                (event.key, getattr(event, on_device) / 1e6 / self.plan.steps)
                for event in self._profiler.key_averages()
            ]
            self._kernels = sorted(found, key=lambda kernel: -kernel[1])[:KERNELS]

    def _take_peak(self) -> None:
        if self.device.type == "cuda":
            self._peaks.append(torch.cuda.max_memory_allocated(self.device) / 2**30)
            torch.cuda.reset_peak_memory_stats(self.device)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()
