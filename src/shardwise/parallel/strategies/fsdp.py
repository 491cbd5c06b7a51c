"""Every rank holds a part of each parameter, and of its gradient and optimizer state (`fully_shard`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, cast

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from shardwise.config import Fsdp, Training
from shardwise.errors import ConfigError, ShardwiseError
from shardwise.kernels.unregistered_parameters import unregistered_parameters
from shardwise.parallel.activation_checkpointing import recompute
from shardwise.parallel.advice import Question, Suggestion
from shardwise.parallel.layout import Axes, Layout
from shardwise.parallel.memory import (
    ModelSizes,
    Remedy,
    Shortage,
    StateBytes,
    compute_bytes,
    gib,
    short_bytes,
    whole_copy,
)
from shardwise.parallel.parameter_marks import ParameterMarks
from shardwise.parallel.recipe import ModelSpec, receive, shape_and_weights, tuned
from shardwise.parallel.strategy import Forward, MicroBatch, Strategy
from shardwise.parallel.unused_parameters import UnusedParameters
from shardwise.parallel.weights import low_precision_dtype, materialize


class FullyShardedDataParallel(Strategy):
    name = "fsdp"
    keeps_memory_format = False

    unused: UnusedParameters | None = None
    """Parameters that a rank does not use, where the model is sharded."""

    @property
    def options(self) -> Fsdp:
        return self.training.fsdp or Fsdp()

    # ---------------------------------------------------------------- before a launch

    def axes(self, ranks: int) -> Axes:
        """[replicate ×] shard"""
        return sharding_axes(self.options, ranks, self.training)

    def held_bytes(self, sizes: ModelSizes, ranks: int) -> StateBytes:
        whole, shards = whole_copy(sizes, self.training), dict(self.axes(ranks))["shard"]
        if self.options.sharding_strategy == "NO_SHARD":
            return whole
        # Of the blocks that are gathered, one computes and one is ahead.
        stays = self.options.sharding_strategy == "SHARD_GRAD_OP"
        gathered = (sizes.parameters if stays else 2 * sizes.largest_block) * compute_bytes(self.training)
        return StateBytes(whole.weights / shards, whole.gradients / shards, whole.optimizer / shards, gathered)

    def suggestions(self, question: Question) -> Iterator[Suggestion]:
        machines = question.machines
        if machines.devices > 1:
            yield self._suggestion("SHARD_GRAD_OP", question, machines.devices, order=2, preferred=3)
            if 1 < machines.nodes < machines.devices:
                yield self._suggestion(
                    "HYBRID_SHARD", question, machines.per_node, order=3, preferred=1 if machines.slow_network else 5
                )
            yield self._suggestion("FULL_SHARD", question, machines.devices, order=4, preferred=4)
        yield Suggestion("cpu_offload", ["strategy: fsdp", "fsdp: {cpu_offload: true, activation_checkpointing: true}"])

    def _suggestion(
        self, kind: Literal["SHARD_GRAD_OP", "HYBRID_SHARD", "FULL_SHARD"], question: Question, ranks: int, order: int,
        preferred: int,
    ) -> Suggestion:  # fmt: skip
        """`ranks`: those that share a copy of the model."""
        alike = self.training.model_copy(update={"fsdp": Fsdp(sharding_strategy=kind), "num_nodes": 1})
        held = FullyShardedDataParallel(alike).held_bytes(question.sizes, ranks)
        why = f"Sharded ({kind}) over {question.machines.devices} devices it is {gib(held.total)} per device."
        if kind == "HYBRID_SHARD" and question.machines.slow_network:
            why = (
                f"Sharded within a machine it is {gib(held.total)} per device, and only gradients cross the slow network: "
                "HYBRID_SHARD."
            )
        lines = ["strategy: fsdp", f"fsdp: {{sharding_strategy: {kind}}}"]
        tight = ["strategy: fsdp", f"fsdp: {{sharding_strategy: {kind}, activation_checkpointing: true}}"]
        return Suggestion(kind, lines, held, order, preferred, why, tight if kind == "FULL_SHARD" else None)

    def lighter(self, shortage: Shortage) -> Iterator[Remedy]:
        if self.options.sharding_strategy == "NO_SHARD":
            yield from sharded_instead(self, shortage)
        elif not self.options.cpu_offload:
            yield offloaded(shortage)

    @property
    def recomputes_with(self) -> str | None:
        return None if self.options.activation_checkpointing else "training.fsdp.activation_checkpointing: true"

    # ---------------------------------------------------------------- the model

    def wrap(self, spec: ModelSpec, layout: Layout) -> None:
        self.layout, world = layout, layout.world
        shape, weights = shape_and_weights(spec, self.training, world)
        marks = ParameterMarks(shape)
        if self.shards:
            marks.refuse_gradient_hooks(self.name)
        refuse_what_cannot_be_sharded(shape)
        blocks = spec.find_blocks(shape)
        self.split(shape, spec)
        compiled = regions_of_shards(spec.find_regions(shape), blocks) if spec.find_regions else None
        self.regions = tuned(shape, blocks, compiled, spec.one_size, self.training, world)
        blocks = recompute(shape, blocks, self.options)
        if self.shards:
            units = shard(shape, blocks, self.options, self.training, layout)
            self.unused = UnusedParameters(shape, units, world)
        materialize(shape, world.device, parameters=torch.device("cpu") if self.options.cpu_offload else None)
        receive(shape, weights, world)
        marks.put_on(shape)
        self.model = self.module = shape

    def split(self, shape: nn.Module, spec: ModelSpec) -> None:
        """Matrices are cut before anything is sharded; here they stay whole."""

    @property
    def shards(self) -> bool:
        return True

    # ---------------------------------------------------------------- one step

    def forward_backward(self, micro_batches: Sequence[MicroBatch], forward: Forward) -> None:
        super().forward_backward(micro_batches, forward)
        if self.unused is not None:
            self.unused.settle()

    @contextmanager
    def reducing_gradients(self, last: bool = True, *, only: bool = False) -> Iterator[None]:
        if self.shards:
            cast(FSDPModule, self.model).set_requires_gradient_sync(last or self.options.reduce_every_micro_batch)
        yield

    @property
    def forward_clock(self) -> Literal["device", "host", "thread"] | None:
        return "thread" if self.layout.size("shard") > 1 else super().forward_clock

    # ---------------------------------------------------------------- what the log says

    def notes(self, micro_batches: int) -> Iterator[str]:
        if self.layout.size("shard") == 1 or micro_batches == 1:
            return
        whole = sum(each.numel() * each.element_size() for each in self.module.parameters() if each.requires_grad)
        yield (
            f"gradients are reduced after every micro-batch: no rank keeps more than its part of their {short_bytes(whole)}"
            if self.options.reduce_every_micro_batch
            else f"gradients are reduced on the last micro-batch: until then every rank keeps all {short_bytes(whole)} of them; "
            "training.fsdp.reduce_every_micro_batch: true keeps a part only, and sends more"
        )


def sharding_axes(options: Fsdp, ranks: int, training: Training) -> Axes:
    """Of ranks that share a model: [replicate ×] shard."""
    if options.sharding_strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
        return (("shard", ranks),)
    if options.sharding_strategy == "NO_SHARD":
        return (("replicate", ranks), ("shard", 1))
    if options.shard_size is None and ranks % training.num_nodes:
        raise ConfigError(f"HYBRID_SHARD: {ranks} ranks do not divide evenly over num_nodes: {training.num_nodes}")
    shards = options.shard_size or ranks // training.num_nodes  # ranks of a machine are numbered side by side
    if ranks % shards:
        raise ConfigError(f"training.fsdp.shard_size: {shards} does not divide the {ranks} ranks that share the model")
    return (("replicate", ranks // shards), ("shard", shards))


def sharded_instead(strategy: Strategy, shortage: Shortage) -> Iterator[Remedy]:
    """Where a strategy has a whole copy on every rank: what sharding it would save."""
    counts = [shortage.ranks] if shortage.ranks > 1 else [2, 4, 8]
    now = strategy.held_bytes(shortage.sizes, shortage.ranks).total
    sharded = FullyShardedDataParallel(strategy.training.model_copy(update={"fsdp": None}))
    saved = {count: now - sharded.held_bytes(shortage.sizes, count).total for count in counts}
    count = next((count for count in counts if saved[count] >= shortage.missing), counts[-1])
    yield Remedy(f"training.strategy: fsdp over {count} devices (all of the state is shared)", saved[count])
    yield offloaded(shortage)


def offloaded(shortage: Shortage) -> Remedy:
    what = "training.strategy: fsdp with fsdp: {cpu_offload: true} (the state is in host memory; slow)"
    return Remedy(what, shortage.state - 2 * 4 * shortage.sizes.largest_block)


def shard(
    model: nn.Module, blocks: list[nn.Module], options: Fsdp, training: Training, layout: Layout
) -> list[nn.Module]:
    """Each block is a unit that is gathered when it computes; all else forms the outermost unit. Returns the blocks that are
    units."""
    for parameter in model.parameters():
        if not parameter.is_contiguous():  # such as what a QR decomposition gives: fully_shard takes none (torch 2.13)
            parameter.data = parameter.data.contiguous()
    # Of doubles fp32 would be fewer digits, not more.
    in_fp32 = options.reduce_in == "fp32" and all(each.dtype != torch.float64 for each in model.parameters())
    policy = MixedPrecisionPolicy(
        param_dtype=low_precision_dtype(training), reduce_dtype=torch.float32 if in_fp32 else None
    )
    offload = (
        CPUOffloadPolicy(pin_memory=layout.world.device.type == "cuda") if options.cpu_offload else OffloadPolicy()
    )
    units = sharding_units(model, blocks, options.min_num_params)
    for unit in [*units, model]:
        fully_shard(
            unit,
            mesh=layout.sharding_mesh,
            reshard_after_forward=unit is not model and options.sharding_strategy != "SHARD_GRAD_OP",
            mp_policy=policy,
            offload_policy=offload,
        )
    if options.prefetch > 1:
        _gather_ahead([unit for unit in units if isinstance(unit, FSDPModule)], options.prefetch)
    return units


def sharding_units(model: nn.Module, blocks: list[nn.Module], min_num_params: int) -> list[nn.Module]:
    """The blocks that are sharded on their own; all else forms the outermost unit. What is within another comes before it.

    A block that shares a weight with anything outside it must stay in the outermost unit: a parameter that two units
    own would be reduced twice. An expert that gets no token on a rank is not called there, and would not be gathered: the unit
    is the layer that holds it.
    """
    owners, names = _owners(model), {module: name for name, module in model.named_modules()}
    units = []
    for block in dict.fromkeys(_called_always(model, names[block]) for block in blocks):
        shared = any(owners[key] > times for key, times in _owners(block).items())
        if block is not model and not shared and sum(each.numel() for each in block.parameters()) >= min_num_params:
            units.append(block)
    return sorted(units, key=lambda unit: -names[unit].count(".")) if _nested(units) else units


def _called_always(model: nn.Module, name: str) -> nn.Module:
    parts = name.split(".")
    for depth, part in enumerate(parts):
        if "expert" in part.lower() and isinstance(
            model.get_submodule(".".join(parts[: depth + 1])), nn.ModuleList | nn.ModuleDict
        ):
            return model.get_submodule(".".join(parts[:depth]))
    return model.get_submodule(name)


def _nested(units: list[nn.Module]) -> bool:
    return len({module for unit in units for module in unit.modules()}) < sum(
        len(list(unit.modules())) for unit in units
    )


def regions_of_shards(regions: list[nn.Module], blocks: list[nn.Module]) -> list[nn.Module]:
    """A block is gathered as it begins, which nothing compiled may have in it: what is compiled lies within blocks, or is the
    blocks themselves."""
    within = {module for block in blocks for module in block.modules()}
    return regions if within.issuperset(regions) else blocks


def refuse_what_cannot_be_sharded(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if not parameter.ndim:
            raise ShardwiseError(f"strategy fsdp cannot shard the scalar parameter {name}: give it the shape (1,)")
    names = {parameter: name for name, parameter in model.named_parameters()}
    for where, parameter in unregistered_parameters(model):
        if parameter in names:  # it would stay whole there, and never be trained
            raise ShardwiseError(
                f"strategy fsdp cannot shard {names[parameter]}, which {where} holds too, outside of PyTorch's sight: use ddp, "
                "or reach it through its module alone"
            )
    first_names: dict[nn.Module, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        # torch 2.13 cannot load the state of a module that has two names.
        if first_names.setdefault(module, name) != name and list(module.parameters()):
            raise ShardwiseError(
                f"strategy fsdp cannot shard {name}, which is {first_names[module]} used again: use ddp"
            )


def _gather_ahead(units: list[FSDPModule], depth: int) -> None:
    for position, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(units[position + 1 : position + 1 + depth])
        unit.set_modules_to_backward_prefetch(units[max(0, position - depth) : position][::-1])


def _owners(model: nn.Module) -> Counter[int]:
    """How many modules hold each parameter."""
    return Counter(id(parameter) for module in model.modules() for parameter in module.parameters(recurse=False))
