"""A process's place among the ranks and its share of a global batch: what follows from the config and the number of ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwise.config import Batching, Config, Training, resolve_batching
from shardwise.config.batching import keep_global_batch
from shardwise.config.load import OWN, load_task_class
from shardwise.errors import ConfigError
from shardwise.parallel import Devices, Layout, Strategy, World, refuse, strategy_for


def needs_group(config: Config) -> bool | None:
    """Whether even a single rank forms a process group; None: if there are several."""
    return None if strategy_for(config, 1).one_process else True


def check_plan(config: Config, ranks: int, device: str) -> Strategy:
    """Before anything is launched: refused if the config cannot be run on so many ranks. Returns how it would be."""
    strategy = strategy_for(config, ranks)
    accumulation = accumulation_of(config.training, strategy, ranks, device)
    refuse(strategy.refusals(Devices(ranks, device, accumulation, config.training.batch_size == "auto")))
    return strategy


def accumulation_of(training: Training, strategy: Strategy, ranks: int, device: str) -> int:
    """Micro-batches of a rank, per step, as far as it can be known before a batch size is found."""
    if training.batch_size == "auto":
        return training.gradient_accumulation or 1
    return resolve_batching(training, strategy.copies(ranks) * strategy.devices_per_process(device)).accumulation


def loss_taken_apart(config: Config, ranks: int, device: str) -> str | None:
    """What is to be said, before anything is launched, of a loss that is no sum and is accumulated all the same."""
    if config.task == OWN or getattr(load_task_class(config.task), "loss_is_a_sum", True):
        return None
    accumulation = accumulation_of(config.training, strategy_for(config, ranks), ranks, device)
    if accumulation == 1:
        return None
    return (
        f"the task says that its loss is no sum over samples (loss_is_a_sum = False), and each step has {accumulation} "
        "micro-batches. Each of them gets a loss of its own, and their sum is another loss than that of the whole batch. For "
        "that of the whole batch, set training.gradient_accumulation: 1, with a larger training.batch_size or more ranks"
    )


@dataclass
class BatchPlan:
    strategy: Strategy
    layout: Layout
    batching: Batching
    chosen_for: int
    """The number of devices that the global batch was chosen for."""
    devices_per_process: int = 1
    finds_batch_size: bool = False
    """The size of a micro-batch is still to be found: until then it is 1."""
    found_how: str = ""
    """How it was found, where it was looked for."""

    @classmethod
    def of(cls, config: Config, world: World, *, elastic: bool, finds_batch_size: bool) -> BatchPlan:
        """Refused if config and ranks do not go together."""
        training, ranks = config.training, world.size
        if training.num_gpus not in (None, ranks) and not elastic:
            raise ConfigError(
                f"training.num_gpus: {training.num_gpus}, but {ranks} rank(s) were started. "
                f"Start {training.num_gpus}, or leave num_gpus out to take what there is"
            )
        strategy = strategy_for(config, ranks)
        layout = Layout(world, strategy.axes(ranks))
        driven = strategy.devices_per_process(world.device.type)
        devices = layout.data_size * driven
        batching = resolve_batching(training, devices, elastic=elastic)
        plan = cls(strategy, layout, batching, devices, driven, finds_batch_size)
        plan._refuse()
        return plan

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
        self._refuse()
        return (
            f"{self.batching.world} devices now, {devices} when the run began: accumulation {self.batching.accumulation}, the "
            f"global batch stays {before}"
        )

    def found_batch_size(self, training: Training, how: str) -> None:
        """It was looked for, and is known now."""
        self.batching = resolve_batching(training, self.batching.world)
        self.finds_batch_size, self.found_how = False, how
        self._refuse()

    @property
    def per_process(self) -> Batching:
        """The batching as the loader sees it: a process reads the micro-batches of all its devices at once."""
        driven, batching = self.devices_per_process, self.batching
        return replace(batching, world=batching.world // driven, batch_size=batching.batch_size * driven)

    def _refuse(self) -> None:
        world, accumulation = self.layout.world, self.batching.accumulation
        refuse(self.strategy.refusals(Devices(world.size, world.device.type, accumulation, self.finds_batch_size)))
