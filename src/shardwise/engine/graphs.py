"""When blocks are recorded as CUDA graphs: where the device waits for the host to start its kernels, one by one.

A recording holds for one size of input, and its gradients lie where the next recording writes: so one device, no accumulation,
and samples of one size. It takes time to make, and memory of its own, so that by default a run is watched first.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from shardwise.engine.step import Parts, StepResult
from shardwise.errors import ConfigError, ShardwiseError
from shardwise.kernels.regions import Regions

WATCHED = 20
"""Steps looked at before blocks are recorded."""
MOSTLY = 0.8
"""The share of them at whose end the device must have been idle. (At a line of the log the host waits for it, so not there.)"""
MOST_WAITING = 0.2
"""The share of the time waited for data from which on the host has something else to be faster in."""
LEAST_GAIN = 0.2
"""The share of a step that graphs are expected to save, at least; what that comes to must pay for compiling anew."""
MOST_MEMORY = 0.5
"""The share of the device's memory up to which there is room for recordings: they may take as much again."""


class Graphs:
    def __init__(self, parts: Parts, regions: Regions, *, now: bool) -> None:
        self.parts, self.regions = parts, regions
        self.news = ""
        """What there is to say, for the log."""
        self._watched: list[StepResult] = []
        self._compiling = regions.seconds
        if now:
            regions.replay()

    @classmethod
    def of(cls, parts: Parts, strategy: str, accumulation: int) -> Graphs | None:
        """None: not in this run. Asked for where it cannot be, it is refused."""
        wanted, regions = parts.config.training.cuda_graphs, parts.spread.regions
        if wanted is False:
            return None
        problem = _problem(parts, strategy, accumulation)
        if problem is None and regions is not None:
            return cls(parts, regions, now=wanted is True)
        if wanted is True:
            raise ConfigError(f"training.cuda_graphs: true {problem}; auto does it where it can be done")
        return None

    def step(self, make: Callable[[], StepResult]) -> StepResult:
        self.regions.begin_step()
        try:
            return make()
        except RuntimeError as error:
            if not self.regions.replays or not _says(error, "captur"):
                raise
            # To go on without is not possible in this process: PyTorch's random numbers do not recover from it (torch 2.11).
            raise ShardwiseError(
                "the model cannot be recorded as CUDA graphs: an operation in its blocks waits for the device, or does something "
                f"else that a graph cannot. Set training.cuda_graphs: false. PyTorch says: {' '.join(str(error).split())[:300]}"
            ) from error

    def watch(self, result: StepResult, steps_left: int) -> None:
        """A step that the device has made. Blocks are recorded from the next one on if the last ones kept it waiting."""
        if self.regions.replays or self.regions.problem is not None:
            return
        if self.regions.seconds != self._compiling:  # a step that compiles says nothing of the others
            self._compiling = self.regions.seconds
            self._watched.clear()
            return
        self._watched = [*self._watched, result][-WATCHED:]
        if len(self._watched) < WATCHED or not self._pays(steps_left) or self._memory_used() > MOST_MEMORY:
            return
        self.regions.replay()
        self.news = (
            f"the GPU waits for the host in {self._idle:.0%} of the steps, so the compiled parts of the model are recorded as "
            "CUDA graphs (training.cuda_graphs: false does without)"
        )

    @property
    def _idle(self) -> float:
        return sum(result.device_idle for result in self._watched) / WATCHED

    def _pays(self, steps_left: int) -> bool:
        waited = sum(result.times["wait"] for result in self._watched)
        seconds = waited + sum(
            result.times[phase] for result in self._watched for phase in ("agree", "compute", "update")
        )
        saved = LEAST_GAIN * steps_left * seconds / WATCHED
        return self._idle >= MOSTLY and waited < MOST_WAITING * seconds and saved > self.regions.seconds

    def _memory_used(self) -> float:
        device = self.parts.world.device
        return torch.cuda.max_memory_reserved(device) / torch.cuda.get_device_properties(device).total_memory


def _says(error: BaseException | None, word: str) -> bool:
    """It, or what it came of: the end of a recording that failed is an error of its own."""
    return error is not None and (word in str(error) or _says(error.__cause__ or error.__context__, word))


def _problem(parts: Parts, strategy: str, accumulation: int) -> str | None:
    device = parts.world.device.type
    if device != "cuda":
        return f"needs a CUDA device, and this is a {device}"
    if strategy != "single":
        return f"does not go with strategy {strategy}"
    if accumulation > 1:
        return f"does not go with gradient accumulation, here over {accumulation} micro-batches"
    if not parts.task.one_size:
        return "needs samples of one size, which this task does not promise (`one_size = True` in a task of your own)"
    if parts.spread.regions is None:
        return "records compiled blocks, and this run compiles nothing: set training.compile: true"
    return None
