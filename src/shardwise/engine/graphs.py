"""When blocks are recorded as CUDA graphs: where the device waits for the host to start its kernels, one by one.

A recording holds for one size of input, takes time to make and memory of its own: so it is done in tasks whose samples have one
size, and by default a run is watched first.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator

import torch

from shardwise.data import StepBatch
from shardwise.engine.observers import Observer
from shardwise.engine.out_of_memory import ran_out
from shardwise.engine.parts import Parts
from shardwise.engine.run import Run
from shardwise.engine.step_result import StepResult
from shardwise.errors import ConfigError, ShardwiseError, one_line
from shardwise.kernels.regions import Regions

WATCHED = 20
"""Steps looked at before blocks are recorded."""
MOSTLY = 0.8
"""The share of them that the device must have made before the host had prepared the next. (Of one whose numbers are asked for, as
at a line of the log, nothing is known: the host waits for it.)"""
MOST_WAITING = 0.2
"""The share of the time waited for data from which on the host has something else to be faster in."""
LEAST_GAIN = 0.2
"""The share of a step that graphs are expected to save, at least; what that comes to must pay for compiling anew."""
MOST_MEMORY = 0.5
"""The share of the device's memory up to which there is room for recordings: they may take as much again."""

log = logging.getLogger(__name__)


class Graphs(Observer):
    def __init__(self, parts: Parts, regions: Regions, *, now: bool) -> None:
        self.parts, self.regions = parts, regions
        self._last: StepResult | None = None
        self._watched: deque[StepResult] = deque(maxlen=WATCHED)
        self._compiling = 0.0
        """Seconds that had gone into compiling before this step."""
        if now:
            regions.replay()

    @classmethod
    def of(cls, parts: Parts, accumulation: int) -> Graphs | None:
        """None: not in this run. What the config alone cannot tell is refused here."""
        wanted, regions = parts.config.training.cuda_graphs, parts.strategy.regions
        if wanted is False or parts.world.device.type != "cuda" or parts.strategy.graphs_problem(accumulation):
            return None
        if not parts.task.one_size:
            problem = (
                "needs samples of one size, which this task does not promise (`one_size = True` in a task of your own)"
            )
        elif regions is None or not regions.blocks:
            problem = "records compiled blocks, and this run has none: training.compile: true compiles what regions(model) names"
        else:
            return cls(parts, regions, now=wanted is True)
        if wanted is True:
            raise ConfigError(f"training.cuda_graphs: true {problem}")
        return None

    def before_step(self, run: Run, batch: StepBatch) -> None:
        self.regions.begin_step()
        self._compiling = self.regions.seconds

    def step_failed(self, run: Run, error: Exception) -> None:
        if not self.regions.replays or not isinstance(error, RuntimeError):
            return
        if memory := next(filter(ran_out, _chain(error)), None):
            raise memory from None
        if not any(word in str(each) for each in _chain(error) for word in ("captur", "CUDAGraphs")):
            return
        # To go on without is not possible in this process: PyTorch's random numbers do not recover from it (torch 2.11).
        raise ShardwiseError(
            "the model cannot be recorded as CUDA graphs: something in its blocks waits for the device, or what they give is "
            f"kept over steps. Set training.cuda_graphs: false. PyTorch says: {one_line(error)}"
        ) from error

    def after_step(self, run: Run, batch: StepBatch, result: StepResult) -> None:
        """Looks at the step before, which the device has made meanwhile. If the last ones kept it waiting, blocks are recorded
        from now on."""
        if self._last is not None and self._last.device_idle is not None:
            self._watch(self._last, run.total_steps - self._last.step)
        compiled = self.regions.seconds != self._compiling
        self._last = None if compiled or result.stopped else result
        if compiled:
            self._watched.clear()

    def _watch(self, result: StepResult, steps_left: int) -> None:
        if self.regions.replays or self.regions.problem is not None:
            return
        self._watched.append(result)
        if len(self._watched) < WATCHED or not self._pays(steps_left) or self._memory_used() > MOST_MEMORY:
            return
        self.regions.replay()
        log.info(
            f"step {result.step + 1}: the GPU waits for the host in {self._idle:.0%} of the steps, so the compiled parts of the "
            "model are recorded as CUDA graphs (training.cuda_graphs: false does without)"
        )

    @property
    def _idle(self) -> float:
        return sum(bool(result.device_idle) for result in self._watched) / WATCHED

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


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """It, and what it came of: the end of a recording that failed is an error of its own."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
