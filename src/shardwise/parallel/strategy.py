"""What a strategy is: one way to lay a model over devices. Each is a file under strategies/, which holds all of it.

The engine asks the object and knows no names. Written here is what a strategy does that has a whole copy of the model on
every rank; a file under strategies/ says what it does otherwise. In the order of a run: the questions before a launch, `wrap`,
one step, checkpoints, the log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.compat.distributed import name_without_wrapper
from shardwise.config import Block, Config, Training
from shardwise.config.registry import BUILT_IN, known, load, lookup
from shardwise.errors import ConfigError, ShardwiseError
from shardwise.kernels.low_precision_weights import LowPrecisionWeights
from shardwise.kernels.regions import Regions
from shardwise.optimizers import update_rule
from shardwise.parallel.advice import Question, Suggestion
from shardwise.parallel.gradients import global_norm, gradients
from shardwise.parallel.layout import Axes, Layout, copies_in
from shardwise.parallel.memory import ModelSizes, Remedy, Shortage, StateBytes, whole_copy
from shardwise.parallel.recipe import ModelSpec

Forward = Callable[[nn.Module, Any], Tensor]
"""(model, micro-batch) → its weighted loss."""


class MicroBatch(Protocol):
    inputs: Any

    def idle(self) -> Any:
        """The same, counting nothing."""


@dataclass(frozen=True)
class Devices:
    """What a run is about to be started on."""

    ranks: int
    kind: str
    """cpu or cuda."""
    micro_batches: int = 1
    """Of a rank, per step."""
    finds_batch_size: bool = False
    """`training.batch_size: auto`: the size of a micro-batch is found when the model is there."""


class Strategy:
    name: ClassVar[str]
    block: ClassVar[type[Block] | None] = None
    """Its settings, `training.<name>`, where it has some that config/schema.py does not know."""

    # What the rest of the program must know about it.
    one_process: ClassVar[bool] = False
    """It needs no process group: one process, however many devices it drives."""
    cuts_rows: ClassVar[bool] = False
    """A micro-batch is cut along its rows on the way: its first axis must be the samples."""
    keeps_memory_format: ClassVar[bool] = True
    """Weights may lie in memory in another order than the plain one, such as channels last."""
    compiles: ClassVar[bool] = True
    """`training.compile: auto` may compile its blocks."""
    compiles_on_request: ClassVar[bool] = True
    """`training.compile: true` and fp8 work."""
    scales_loss: ClassVar[bool] = True
    """`precision: 16-mixed` works: all ranks see the same gradients overflow."""
    compresses_gradients: ClassVar[bool] = False
    """`training.ddp.comm_hook` works."""
    records_graphs: ClassVar[bool] = False
    """Its blocks may be recorded as CUDA graphs: nothing is exchanged with other ranks in a step."""
    runs_ahead: ClassVar[bool] = True
    """The host may prepare the next step while a GPU still computes this one."""
    unequal: ClassVar[str] = ""
    """What its numbers are not equal to, for those that do not compute what one process would."""

    # Set by wrap().
    layout: Layout
    model: nn.Module
    """What the task calls."""
    module: nn.Module
    """The same, without a wrapper around it: its names are those of the model as it was built."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self.low_precision: LowPrecisionWeights | None = None
        """Copies that the model computes with; where it is sharded, `fully_shard` makes them."""
        self.updates_from_copies = False
        """The optimizer takes gradients from the copies."""
        self.regions: Regions | None = None
        """Its blocks, where they are compiled."""

    @property
    def options(self) -> Any:
        """Its block, as written or by default."""
        written = getattr(self.training, self.name, None)
        return self.block() if written is None and self.block is not None else written

    # ---------------------------------------------------------------- before a launch

    def axes(self, ranks: int) -> Axes:
        """Names and sizes of the mesh, outermost first; empty: every rank has a whole copy. The last axis has neighbouring
        ranks, which are those of one machine."""
        return ()

    def copies(self, ranks: int) -> int:
        """Among how many copies of the model this many ranks share a global batch."""
        return copies_in(self.axes(ranks), ranks)

    def devices_per_process(self, kind: str) -> int:
        """`kind`: cpu or cuda."""
        return 1

    def refusals(self, devices: Devices) -> Iterator[str]:
        """What it cannot do: each with the reason, and what works."""
        training = self.training
        if self.one_process and devices.ranks > 1:
            yield f"strategy: {self.name} is one process, but {devices.ranks} ranks were started; ddp is for several"
        hook = training.ddp.comm_hook
        if hook != "none" and not self.compresses_gradients:
            yield f"training.ddp.comm_hook: {hook} works under ddp and zero1, not under {self.name}"
        if training.precision == "16-mixed" and not self.scales_loss:
            yield (
                f"strategy {self.name} does not go with precision 16-mixed: its ranks would each judge on their own whether a "
                "gradient overflowed; use bf16-mixed"
            )
        if training.cuda_graphs is True and (problem := self._graphs_refused(devices)):
            yield f"training.cuda_graphs: true {problem}"
        yield from update_rule(training.optimizer).refusals(whole=self.whole_parameters(devices.ranks))
        if not self.compiles_on_request and (training.precision == "fp8-mixed" or training.compile is True):
            asked = "precision: fp8-mixed" if training.precision == "fp8-mixed" else "compile: true"
            yield f"training.{asked} does not go with strategy {self.name} yet; fsdp can do it"

    def _graphs_refused(self, devices: Devices) -> str | None:
        if devices.kind != "cuda":
            return "needs a CUDA device; auto records where there is one"
        if devices.finds_batch_size:
            return "does not go with batch_size: auto, which leaves no memory for recordings"
        problem = self.graphs_problem(devices.micro_batches)
        return f"does not go with {problem}; auto records where it can be done" if problem else None

    def whole_parameters(self, ranks: int) -> bool:
        """Every rank holds whole parameters."""
        sizes = dict(self.axes(ranks))
        return sizes.get("shard", 1) == sizes.get("tensor", 1) == 1

    def graphs_problem(self, micro_batches: int) -> str | None:
        """What keeps blocks from being recorded as CUDA graphs: exchanges with other ranks are not recorded, and gradients lie
        where the next recording writes, so that nothing can be added to them."""
        if not self.records_graphs:
            return f"strategy {self.name}"
        return f"gradient accumulation, here over {micro_batches} micro-batches" if micro_batches > 1 else None

    def held_bytes(self, sizes: ModelSizes, ranks: int) -> StateBytes:
        """What each device holds of weights, gradients and optimizer state, by arithmetic."""
        return whole_copy(sizes, self.training)

    def suggestions(self, question: Question) -> Iterator[Suggestion]:
        """Ways to hold this model on these machines that a user may choose: for `shardwise config advise`."""
        return iter(())

    def lighter(self, shortage: Shortage) -> Iterator[Remedy]:
        """Ways to hold the same model in less memory, the plainest first: for a run that does not fit."""
        return iter(())

    @property
    def recomputes_with(self) -> str | None:
        """What to write to recompute activations; None: it is done already, or cannot be."""
        return "training.strategy: fsdp with fsdp: {sharding_strategy: NO_SHARD, activation_checkpointing: true}"

    def packing_problem(self, samples: str) -> str:
        """What speaks against several `samples` packed into one row; empty: nothing."""
        if self.cuts_rows:
            return f"strategy {self.name} cuts a micro-batch along its rows, and packed {samples}s are one row"
        return ""

    # ---------------------------------------------------------------- the model

    def wrap(self, spec: ModelSpec, layout: Layout) -> None:
        """Lay the model over the ranks, and set `layout`, `model` and `module`. In this order for every model: tensor types →
        batch norm → stages → split matrices → fp8 → compile regions → activation checkpointing → sharding or replicas →
        weights. recipe.py has the steps."""
        raise NotImplementedError

    @property
    def whole(self) -> nn.Module:
        """The whole model, to be looked at and counted, not to be computed with."""
        return self.module

    @property
    def alone(self) -> nn.Module:
        """What a rank calls to try out a batch size: where it can be, without the others."""
        return self.model

    def ask(self, job: Callable[[nn.Module], Any]) -> Any:
        """What a job, such as the task's loss, makes of the model, without gradient. Every rank that shares the model asks."""
        return job(self.alone)

    @property
    def waits_for_others(self) -> bool:
        """A rank that computes with `alone` meets the others on the way, and keeps them waiting if it fails."""
        return self.layout.world.size > 1

    def running_buffers(self) -> dict[str, Tensor]:
        """Those that belong into a checkpoint, such as batch norm's statistics, by name: a forward pass may change them."""
        kept = set(self.module.state_dict())  # which knows nothing of the wrappers of recomputed blocks
        named = ((name_without_wrapper(name), buffer) for name, buffer in self.module.named_buffers())
        return {name: buffer for name, buffer in named if name in kept}

    @cached_property
    def statistics(self) -> list[Tensor]:
        """The same, without their names, asked once: for every step."""
        return list(self.running_buffers().values())

    def share_buffers(self) -> None:
        """Running statistics are those of the first copy on every rank: before every evaluation and every checkpoint."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            for buffer in self.running_buffers().values():
                dist.broadcast(buffer, src=self.layout.first_copy, group=self.layout.copies)

    @contextmanager
    def one_model(self, *, moments: bool = False) -> Iterator[None]:
        """In here every rank has the model that is evaluated and saved; where ranks train copies that differ, each has its own
        back afterwards. `moments`: those of the optimizer are looked at too."""
        self.share_buffers()
        yield

    def make_optimizer(
        self, kind: Callable[..., torch.optim.Optimizer], groups: list[dict[str, Any]], settings: dict[str, Any]
    ) -> torch.optim.Optimizer:
        """Built after the model is wrapped: the optimizer must hold the parameters as they are now. A strategy that needs its
        optimizer later keeps it here."""
        return kind(groups, **settings)

    @property
    def shards_optimizer(self) -> bool:
        """Every rank updates some parameters only, and sends them to the others."""
        return False

    def release(self) -> None:
        """Before the process group goes."""

    # ---------------------------------------------------------------- one step

    def computing(self) -> AbstractContextManager[None]:
        """Forward and backward passes happen in here: the model has the weights that it computes with."""
        return self.low_precision.in_place() if self.low_precision is not None else nullcontext()

    def forward_backward(self, micro_batches: Sequence[MicroBatch], forward: Forward) -> None:
        """Forward and backward passes of a step. Gradients are reduced over the ranks on the last micro-batch only."""
        with self.computing():
            for position, micro in enumerate(micro_batches, start=1):
                with self.reducing_gradients(position == len(micro_batches), only=len(micro_batches) == 1):
                    forward(self.model, micro).backward()

    @contextmanager
    def reducing_gradients(self, last: bool = True, *, only: bool = False) -> Iterator[None]:
        """The passes of one micro-batch. `last`: their gradients are reduced over the ranks. `only`: there is no other in this
        step, so that nothing has to be added to its gradients."""
        if self.low_precision is not None:
            self.low_precision.collecting = not (only and self.updates_from_copies)
        yield
        if self.low_precision is not None and self.low_precision.collecting:
            self.low_precision.collect()

    def gradient_of(self, parameter: nn.Parameter) -> Tensor | None:
        """Wherever it is: it may have stayed with a low-precision copy."""
        return parameter.grad if self.low_precision is None else self.low_precision.gradient_of(parameter)

    def gradient_norm(self, parameters: Sequence[nn.Parameter], step: int) -> Tensor:
        """Of the whole model, wherever its parts are; the same on every rank, on its device. Refused if a gradient that must
        be there is not."""
        grads = gradients(parameters, self.gradient_of)
        if not grads:
            raise ShardwiseError(
                f"step {step}: no parameter got a gradient: does the loss depend on the model's parameters?"
            )
        if self.needs_every_gradient and len(grads) < len(parameters) and (names := self.without_gradient()):
            raise self.unused_parameters(names, step)
        return global_norm(grads).to(self.layout.world.device)

    @property
    def needs_every_gradient(self) -> bool:
        """A parameter that gets no gradient would go wrong without a word."""
        return False

    unused_remedy: ClassVar[str] = ""
    """What to do about such a parameter, besides freezing it."""

    def without_gradient(self) -> list[str]:
        named = self.module.named_parameters()
        return [name for name, each in named if each.requires_grad and self.gradient_of(each) is None]

    def unused_parameters(self, names: Sequence[str], step: int) -> ShardwiseError:
        listed = ", ".join(names[:16]) + (f" and {len(names) - 16} more" if len(names) > 16 else "")
        return ShardwiseError(
            f"step {step}: {len(names)} parameter(s) got no gradient, of which strategy {self.name} must know beforehand: "
            f"{listed}.\n  {self.unused_remedy}freeze or remove them"
        )

    def after_update(self, step: int) -> None:
        """The optimizer has made its `step`-th step, from 1. Not called where a step was skipped."""

    @property
    def forward_clock(self) -> Literal["device", "host", "thread"] | None:
        """By which clock a rank's forward passes are its own work. Where the model is sharded, they wait for the weights of
        others: then only the processor time of this thread is. None: ranks have different work by design."""
        return "device" if self.layout.world.device.type == "cuda" else "host"

    def idle_seconds(self, computing: float) -> float | None:
        """Of the seconds that a step computed, those in which this rank waited for others by design."""
        return None

    # ---------------------------------------------------------------- checkpoints

    @property
    def needs_rehearsal(self) -> bool:
        """A backward pass must be made before a resumed run goes on: it decides how gradients are added up."""
        return False

    def extra_state(self) -> dict[str, Tensor] | None:
        """Tensors of this rank alone that belong into a checkpoint, besides weights and moments. Not None: it has some. Asked
        within `one_model`; they are copied before training goes on. Also asked before a resume: whether there can be some."""
        return None

    def load_extra_state(self, tensors: dict[str, Tensor]) -> bool:
        """What `extra_state` gave, on as many ranks. False: another strategy gave it, and this one has no use for it."""
        return True

    def forget_extra_state(self) -> None:
        """After a gradient that was no number: nothing of it may stay."""

    extra_state_lost: ClassVar[str] = ""
    """What a run says that was resumed from a checkpoint without extra state that it can use: of another number of ranks, or of
    another strategy."""

    # ---------------------------------------------------------------- what the log says

    def notes(self, micro_batches: int) -> Iterator[str]:
        """What a user should know of it, at the start of a run."""
        return iter(())

    def summary(self, idle: float, computing: float) -> Iterator[tuple[str, str]]:
        """Lines for the end of a run: what, and how much. The seconds are those of rank 0, of all steps."""
        return iter(())


# ---------------------------------------------------------------- the registry


def strategy_class(name: str) -> type[Strategy]:
    """A file of strategies/, or one that another package brings (entry point `shardwise.strategies`)."""
    entry = lookup("shardwise.strategies", name)
    if entry is None:
        raise ConfigError(f"there is no strategy {name!r}; there is {', '.join(known('shardwise.strategies'))}")
    found = load(entry)
    if not (isinstance(found, type) and issubclass(found, Strategy)):
        raise ConfigError(f"strategy {name} stands for {entry.value}, which is not a subclass of shardwise.Strategy")
    return found


def built_in_strategies(training: Training) -> list[Strategy]:
    """All that come with shardwise, before anything is built."""
    return [strategy_class(name)(training) for name in BUILT_IN["shardwise.strategies"]]


def strategy_for(config: Config, ranks: int) -> Strategy:
    """That of a run on so many ranks, before anything is built."""
    return strategy_class(config.strategy_on(ranks))(config.training)


def refuse(refusals: Iterable[str]) -> None:
    """The first of them ends the run before it begins."""
    for problem in refusals:
        raise ConfigError(problem)
