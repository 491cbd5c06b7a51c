"""A process's place among the ranks and its share of a global batch: what follows from the config and the number of ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from shardwise.config import Batching, Config, Training, resolve_batching
from shardwise.config.batching import keep_global_batch
from shardwise.errors import ConfigError
from shardwise.parallel import Layout, World, refuse_incompatible


def needs_group(config: Config) -> bool | None:
    """Whether even a single rank forms a process group; None: if there are several."""
    return None if config.strategy_on(1) in ("single", "dp") else True


@dataclass
class BatchPlan:
    strategy: str
    layout: Layout
    batching: Batching
    chosen_for: int
    """The number of devices that the global batch was chosen for."""
    devices_per_process: int = 1
    """dp has all of them in one process."""

    @classmethod
    def of(cls, config: Config, world: World, *, elastic: bool, finds_batch: bool) -> BatchPlan:
        """Refused if config and ranks do not go together."""
        training, ranks = config.training, world.size
        if training.num_gpus not in (None, ranks) and not elastic:
            raise ConfigError(
                f"training.num_gpus: {training.num_gpus}, but {ranks} rank(s) were started. "
                f"Start {training.num_gpus}, or leave num_gpus out to take what there is"
            )
        strategy = config.strategy_on(ranks)
        layout = Layout.of(strategy, training, world)
        driven = max(1, torch.cuda.device_count()) if strategy == "dp" and world.device.type == "cuda" else 1
        devices = layout.data_size * driven
        place = cls(strategy, layout, resolve_batching(training, devices, elastic=elastic), devices, driven)
        if finds_batch and strategy == "pipeline":
            raise ConfigError(
                "training.batch_size: auto does not go with strategy pipeline: its stages are made for one size of micro-batch"
            )
        if training.cuda_graphs is True and world.device.type != "cuda":
            raise ConfigError("training.cuda_graphs: true needs a CUDA device; auto records where there is one")
        if training.cuda_graphs is True and finds_batch:
            raise ConfigError(
                "training.cuda_graphs: true does not go with batch_size: auto, which leaves no memory for recordings"
            )
        place._refuse(training)
        return place

    def keep_batch(self, training: Training, so_far: tuple[int, int] | None) -> str | None:
        """Before a run that goes on by itself is prepared: keep the global batch that it began with.

        `so_far`: that, and the number of devices it was chosen for. Returns what there is to say.
        """
        if so_far is None:
            return None
        before, devices = so_far
        if devices == self.chosen_for or resolve_batching(training, devices, elastic=True).global_batch != before:
            return None  # as before, or asked for otherwise by the user
        self.batching, self.chosen_for = keep_global_batch(self.batching, before), devices
        self._refuse(training)
        return (
            f"{self.batching.world} devices now, {devices} when the run began: accumulation {self.batching.accumulation}, the "
            f"global batch stays {before}"
        )

    def found_batch(self, training: Training) -> None:
        """The batch size was looked for, and is known now."""
        self.batching = resolve_batching(training, self.batching.world)
        self._refuse(training)

    @property
    def per_process(self) -> Batching:
        """The batching as the loader sees it: a process reads the micro-batches of all its devices at once."""
        driven, batching = self.devices_per_process, self.batching
        return replace(batching, world=batching.world // driven, batch_size=batching.batch_size * driven)

    def _refuse(self, training: Training) -> None:
        refuse_incompatible(self.strategy, training, self.layout, self.batching.accumulation)
