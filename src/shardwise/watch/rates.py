"""Speed, memory and what is left: figures that say how they were made."""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass, field

import torch

# Dense bf16 peaks in FLOP/s, from the vendors' data sheets. A name that is not here has no MFU: never a guess.
PEAKS: dict[str, float] = {
    "H200 NVL": 836e12,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10G": 70e12,
    "V100": 125e12,
    "T4": 65e12,
}


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def peak_flops(name: str) -> float | None:
    words = name.replace("-", " ").split()
    if "MIG" in words:  # a slice of a card
        return None
    return next((peak for key, peak in PEAKS.items() if all(part in words for part in key.split())), None)


def memory(device: torch.device) -> tuple[float, str]:
    """Peak memory of this rank in GiB, and what kind of memory that is."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30, "allocated"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / 2**30, "resident"


@dataclass
class Rates:
    """Throughput over the steps since the last reading, and the time that is left."""

    flops_per_count: float | None
    peak: float | None
    """Of all devices together."""
    began: float = field(default_factory=time.perf_counter)
    samples: int = 0
    counts: int = 0
    waited: float = 0.0
    """Seconds spent waiting for data."""
    paused: float = 0.0
    total_steps: int = 0
    total_time: float = 0.0
    total_samples: int = 0

    def add(self, samples: int, counts: int, waited: float = 0.0) -> None:
        self.samples += samples
        self.counts += counts
        self.waited += waited
        self.total_steps += 1
        self.total_samples += samples

    def pause(self, seconds: float) -> None:
        """Evaluation and checkpoints are not training time."""
        self.paused += seconds

    def read(self) -> dict[str, float | None]:
        elapsed = self._elapsed()
        per_second = self.counts / elapsed
        achieved = self.flops_per_count * per_second if self.flops_per_count else None
        readings = {
            "samples_per_second": self.samples / elapsed,
            "counts_per_second": per_second,
            "mfu": achieved / self.peak if achieved and self.peak else None,
            "data_wait_share": min(1.0, self.waited / elapsed),
        }
        self.total_time += elapsed
        self.began, self.samples, self.counts = time.perf_counter(), 0, 0
        self.waited = self.paused = 0.0
        return readings

    def average_samples(self) -> float:
        return self.total_samples / max(self.total_time + self._elapsed(), 1e-9)

    def seconds_left(self, steps: int) -> float:
        return steps * (self.total_time + self._elapsed()) / max(1, self.total_steps)

    def _elapsed(self) -> float:
        return max(1e-9, time.perf_counter() - self.began - self.paused)


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def short(number: float) -> str:
    for size, mark in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.1f}{mark}"
    return f"{number:.1f}".removesuffix(".0")
