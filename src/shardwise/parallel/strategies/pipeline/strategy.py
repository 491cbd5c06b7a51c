"""Pipeline parallelism: the blocks of a model are cut into stages, and micro-batches pass from one to the next.

The model's own code runs on every stage, from the top. The blocks that a stage does not have are stood in for: one
before its own hands on what the stage before sent, one after them ends the forward pass there. So what lies around the
blocks (masks, positions, rotary tables) is computed on every stage from the batch, and any task that names its blocks
can be cut. Weights outside the blocks belong to the first stage if they are registered before the blocks, else to the
last; on the others zeros that take no memory stand in for them.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from shardwise.compat.distributed import name_without_wrapper
from shardwise.config import Fsdp
from shardwise.config.schema import Pipeline as Options
from shardwise.errors import ConfigError
from shardwise.parallel.activation_checkpointing import recompute
from shardwise.parallel.gradients import global_norm, gradients
from shardwise.parallel.layout import Axes, Layout, group_size
from shardwise.parallel.memory import ModelSizes, StateBytes, whole_copy
from shardwise.parallel.object_collectives import dtype_name
from shardwise.parallel.parameter_marks import ParameterMarks
from shardwise.parallel.recipe import ModelSpec, Trial, shape_and_weights
from shardwise.parallel.strategies.fsdp import refuse_what_cannot_be_sharded, shard, sharding_axes
from shardwise.parallel.strategies.pipeline.runtime import FINE, Pipeline
from shardwise.parallel.strategies.pipeline.split import Piece, Sketch, cut_evenly, has_tied_ends, weigh
from shardwise.parallel.strategies.pipeline.timing import block_times
from shardwise.parallel.strategy import Devices, Forward, MicroBatch, Strategy
from shardwise.parallel.weights import FindBlocks, Weights, materialize


class PipelineParallel(Strategy):
    name = "pipeline"
    cuts_rows = True
    keeps_memory_format = False
    compiles = compiles_on_request = False
    scales_loss = False
    runs_ahead = False
    unused_remedy = "Register them on the side of the blocks where they are used (before or after), or "
    recomputes_with = None
    needs_every_gradient = True
    forward_clock = None

    model: Pipeline

    @property
    def options(self) -> Options:
        return self.training.pipeline or Options()

    # ---------------------------------------------------------------- before a launch

    def axes(self, ranks: int) -> Axes:
        """stage × [replicate ×] shard, or stage × replicate"""
        fsdp = self.training.fsdp
        stages = group_size("pipeline.stages", self.options.stages or ranks, ranks)
        copies = ranks // stages
        inner = sharding_axes(fsdp, copies, self.training) if fsdp else (("replicate", copies),)
        return (("stage", stages), *inner)

    def refusals(self, devices: Devices) -> Iterator[str]:
        yield from super().refusals(devices)
        if devices.finds_batch_size:
            yield "training.batch_size: auto does not go with strategy pipeline: its stages are made for one size of micro-batch"
        if self.training.fsdp is not None and self.training.fsdp.cpu_offload:
            yield "training.fsdp.cpu_offload does not go with strategy pipeline; fsdp alone can do it"
        schedule, stages, micro_batches = (
            self.options.schedule,
            dict(self.axes(devices.ranks))["stage"],
            devices.micro_batches,
        )
        if schedule == "gpipe":
            return
        rounds = max(1, micro_batches // stages)
        fits = micro_batches % rounds == 0 if schedule in FINE else micro_batches >= stages
        if not fits:
            yield (
                f"training.pipeline.schedule: {schedule} on {stages} stages cannot take {micro_batches} micro-batch(es) per "
                f"step: set training.gradient_accumulation to {stages * max(1, -(-micro_batches // stages))}"
            )

    def held_bytes(self, sizes: ModelSizes, ranks: int) -> StateBytes:
        """If all stages are of one size."""
        axes, whole = dict(self.axes(ranks)), whole_copy(sizes, self.training)
        parts = axes["stage"] * axes.get("shard", 1)
        return StateBytes(whole.weights / parts, whole.gradients / parts, whole.optimizer / parts)

    # ---------------------------------------------------------------- the model

    def wrap(self, spec: ModelSpec, layout: Layout) -> None:
        """This rank's pieces of the model, each with its own weights."""
        self.layout, world, training = layout, layout.world, self.training
        shape, weights = shape_and_weights(spec, training, world)
        marks = ParameterMarks(shape)
        if training.fsdp is not None:
            marks.refuse_gradient_hooks(self.name)
        if self.options.schedule == "zero_bubble":
            marks.refuse_hooks("training.pipeline.schedule: zero_bubble")
        shape = copy.deepcopy(shape).to("meta")
        stages = layout.size("stage")
        count = stages * (self.options.pieces_per_rank if self.options.schedule in FINE else 1)
        self._refuse(shape, spec.find_blocks(shape), count, stages)
        sketch = Sketch(shape, spec.find_blocks, world.device)
        sketch.check(lambda model: spec.trial(model, world.device))
        edges = cut_evenly(self._sizes(shape, spec, weights), count)
        pieces = []
        for number in range(layout.stage, count, stages):
            model = copy.deepcopy(shape)
            piece = Piece(model, spec.find_blocks(model), number, edges, world.device)
            own = recompute(model, piece.own_blocks, training.fsdp or Fsdp())
            if training.fsdp is not None:
                refuse_what_cannot_be_sharded(model)
                shard(piece, own, training.fsdp, training, layout)
            materialize(piece, world.device)
            pieces.append(piece)
        _receive(pieces, weights, layout)
        for piece in pieces:
            marks.put_on(piece.model)
        sharded = training.fsdp is not None
        self.model = Pipeline(shape, sketch, pieces, edges, self.options, layout, spec.micro_batches, sharded=sharded)
        self.module = self.model.names

    def _refuse(self, shape: nn.Module, blocks: list[nn.Module], count: int, stages: int) -> None:
        if len(blocks) < count:
            raise ConfigError(
                f"strategy pipeline: the model has {len(blocks)} block(s), too few for {count} pieces "
                f"({self.options.schedule} on {stages} stages). Use fewer training.pipeline.stages, or fsdp"
            )
        if self.options.schedule == "zero_bubble" and has_tied_ends(shape, blocks):
            raise ConfigError(
                "training.pipeline.schedule: zero_bubble cannot take a model whose input and output share weights (torch "
                "2.13); untie them, or use interleaved"
            )

    def _sizes(self, shape: nn.Module, spec: ModelSpec, weights: Weights) -> Sequence[float]:
        """By which the blocks are shared out."""
        if self.options.balance == "parameters":
            return weigh(shape, spec.find_blocks(shape))
        return _times(shape, spec.find_blocks, weights, self.layout, spec.trial)

    @property
    def whole(self) -> nn.Module:
        return self.model.whole

    # ---------------------------------------------------------------- one step

    def forward_backward(self, micro_batches: Sequence[MicroBatch], forward: Forward) -> None:
        """As many micro-batches as the pipe is made for: a short batch is filled up with one that counts nothing."""
        missing = self.model.micro_batches - len(micro_batches)
        self.model.run([*micro_batches, *[micro_batches[0].idle()] * missing], forward)

    def ask(self, job: Callable[[nn.Module], Any]) -> Any:
        return self.model.through(job)  # a loss may look at more of the model than what calling it gives

    def gradient_norm(self, parameters: Sequence[nn.Parameter], step: int) -> Tensor:
        """Of all stages; a weight that two of them share is counted once."""
        own = gradients(each for each in parameters if id(each) not in self.model.counted_elsewhere)
        lacking = len(parameters) - len(gradients(parameters))
        norm, lacking_anywhere = self.model.norm_over_stages(global_norm(own).to(self.layout.world.device), lacking)
        if lacking_anywhere:  # on any stage, and every stage knows
            everywhere = self.model.of_all_stages(self.without_gradient())
            raise self.unused_parameters(list(dict.fromkeys(itertools.chain.from_iterable(everywhere))), step)
        return norm

    def idle_seconds(self, computing: float) -> float | None:
        """On CUDA the host does not see when work ends."""
        return computing - self.model.busy if self.layout.world.device.type == "cpu" else None

    # ---------------------------------------------------------------- what the log says

    def notes(self, micro_batches: int) -> Iterator[str]:
        blocks = " + ".join(str(end - begin) for begin, end in itertools.pairwise(self.model.edges))
        yield (
            f"pipeline: {self.options.schedule}, {blocks} blocks on {self.layout.size('stage')} stages, "
            f"{micro_batches} micro-batches per step: a rank is predicted to wait "
            f"{self.model.bubble:.0%} of the time; a larger training.gradient_accumulation lowers that"
        )

    def summary(self, idle: float, computing: float) -> Iterator[tuple[str, str]]:
        if idle:
            yield "pipeline bubble", f"{idle / computing:.0%} measured on rank 0, {self.model.bubble:.0%} predicted"


def _times(shape: nn.Module, find_blocks: FindBlocks, weights: Weights, layout: Layout, trial: Trial) -> list[float]:
    def measure() -> list[float]:
        model = materialize(copy.deepcopy(shape), torch.device("cpu"))
        model.load_state_dict(weights.state, strict=False)
        for name, buffer in model.named_buffers():
            buffer.copy_(weights.buffers[name])
        return block_times(model.train(), find_blocks(model), lambda whole: trial(whole, torch.device("cpu")))

    times: list[float] = layout.world.on_first(measure)
    return times


def _receive(pieces: list[Piece], weights: Weights, layout: Layout) -> None:
    """Each tensor travels to all ranks in turn, and stays where it is needed: no rank ever holds the whole model."""
    world = layout.world
    whole = {**weights.state, **weights.buffers}
    wanted = [
        {name_without_wrapper(name) for name, _ in [*piece.model.named_parameters(), *piece.model.named_buffers()]}
        for piece in pieces
    ]
    kept: list[dict[str, Tensor]] = [{} for _ in pieces]
    for name, (shape, dtype) in world.from_first(
        {name: (list(each.shape), dtype_name(each.dtype)) for name, each in whole.items()}
    ).items():
        tensor = (
            whole[name].to(world.device)
            if world.is_first
            else torch.empty(shape, dtype=getattr(torch, dtype), device=world.device)
        )
        dist.broadcast(tensor, src=0)
        for names, own in zip(wanted, kept, strict=True):
            if name in names:
                own[name] = tensor
    for piece, own in zip(pieces, kept, strict=True):
        names = {name_without_wrapper(name) for name in piece.model.state_dict()}
        options = StateDictOptions(full_state_dict=True, strict=False)
        set_model_state_dict(piece.model, {name: own[name] for name in own if name in names}, options=options)
        for name, buffer in piece.model.named_buffers():
            buffer.copy_(own[name_without_wrapper(name)])
