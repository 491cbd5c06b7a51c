"""The pipe itself: micro-batches pass through the pieces of a model in the order of a schedule."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from shardwise.compat.tensors import tree_leaves
from shardwise.config.schema import Pipeline as Options
from shardwise.parallel.layout import Layout
from shardwise.parallel.object_collectives import broadcast_plain, broadcast_tree, dtype_name, gather_plain
from shardwise.parallel.strategies.pipeline.split import Leave, Piece, Sketch, graft
from shardwise.parallel.strategy import Forward, MicroBatch

Boundary = tuple[torch.Size, torch.dtype]

FINE = ("interleaved", "zero_bubble")
"""Schedules that have several pieces of the model on a rank."""
_SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
}


def predicted_bubble(options: Options, stages: int, micro_batches: int) -> float:
    """The share of a step in which a rank waits, if forward takes half of backward and all stages take as long."""
    if options.schedule == "zero_bubble":  # weight gradients, a third of the work, fill two thirds of the gaps
        return (stages - 1) / (3 * micro_batches * options.pieces_per_rank + stages - 1)
    fine = options.pieces_per_rank if options.schedule == "interleaved" else 1
    return (stages - 1) / (micro_batches * fine + stages - 1)


class Pipeline(nn.Module):
    """What the task calls to evaluate; `run` is what trains."""

    def __init__(
        self,
        shape: nn.Module,
        sketch: Sketch,
        pieces: list[Piece],
        edges: list[int],
        options: Options,
        layout: Layout,
        micro_batches: int,
        *,
        sharded: bool,
    ) -> None:
        super().__init__()
        self.pieces = nn.ModuleList(pieces)
        self.edges, self.options, self.layout, self.sharded = edges, options, layout, sharded
        self.micro_batches = micro_batches
        self.group = layout.mesh["stage"].get_group()
        self._shape = [shape]  # in a list: it is not a part of this rank's model
        self._sketch = sketch
        self.names = graft(shape, pieces)
        self._known: dict[Any, list[Boundary]] = {}
        self._looked = False
        self._room: list[int] = [0] * (len(edges) - 2)
        self._schedule: Any = None
        self._forward: Forward
        self._batch: Sequence[MicroBatch]
        self._boundaries: list[list[Boundary]]
        self.busy = 0.0
        """Seconds of computing in the last step, where they can be told from the host."""

    @property
    def whole(self) -> nn.Module:
        """The shape of the whole model, on the meta device."""
        shape: nn.Module = self._shape[0]
        return shape

    @property
    def count(self) -> int:
        return len(self.edges) - 1

    @property
    def bubble(self) -> float:
        return predicted_bubble(self.options, self.layout.size("stage"), self.micro_batches)

    # ---------------------------------------------------------------- training

    def run(self, batch: Sequence[MicroBatch], forward: Forward) -> None:
        """Forward and backward of all micro-batches, in the order of the schedule. Gradients are those of all copies."""
        self._forward, self._batch = forward, batch
        self._boundaries = [self._boundaries_of(micro) for micro in batch]
        self._make_room()
        numbers = torch.arange(len(batch)).unsqueeze(1)
        self.busy = 0.0
        first = (numbers,) if any(piece.is_first for piece in self.pieces) else ()
        self._schedule.step(*first, target=numbers, return_outputs=False, number=numbers)
        self._reduce()

    def _make_room(self) -> None:
        """Activations travel in buffers of one size, which must hold the largest so far."""
        needed = [max(each[boundary][0].numel() for each in self._boundaries) for boundary in range(self.count - 1)]
        if self._schedule is not None and all(a <= b for a, b in zip(needed, self._room, strict=True)):
            return
        self._room = [max(a, b) for a, b in zip(needed, self._room, strict=True)]
        stages = [self._stage(piece) for piece in self.pieces]
        kind = _SCHEDULES[self.options.schedule]
        self._schedule = kind(
            stages if self.options.schedule in FINE else stages[0],
            self.micro_batches,
            loss_fn=lambda output, target: output,
            scale_grads=False,
        )

    def _stage(self, piece: Any) -> PipelineStage:
        def buffer(boundary: int) -> Tensor:
            dtype = self._boundaries[0][boundary][1]
            return torch.empty(self._room[boundary], dtype=dtype, device="meta", requires_grad=True)

        piece.work = self._work
        stage = TimedStage(
            piece,
            piece.number,
            self.count,
            self.layout.world.device,
            input_args=torch.empty(1, 1, dtype=torch.int64, device="meta")
            if piece.is_first
            else buffer(piece.number - 1),
            output_args=torch.empty((), device="meta", requires_grad=True) if piece.is_last else buffer(piece.number),
            group=self.group,
        )
        stage.pipeline = self
        return stage

    def _work(self, piece: Piece, incoming: Tensor, number: int) -> Tensor:
        """One micro-batch through one piece: from a buffer to a buffer, or to the loss."""
        boundaries = self._boundaries[number]
        if not piece.is_first:
            shape, _ = boundaries[piece.number - 1]
            piece.received = incoming[: shape.numel()].view(shape).clone()  # a block may change its input in place
        try:
            return self._forward(piece.model, self._batch[number])
        except Leave as leave:
            hidden = leave.hidden
        _, dtype = boundaries[piece.number]
        flat = hidden.to(dtype).flatten()
        return F.pad(flat, (0, self._room[piece.number] - len(flat)))

    def _boundaries_of(self, micro: MicroBatch) -> list[Boundary]:
        """What the pieces hand on for this micro-batch, found on the meta device once for inputs of each shape."""
        key = tuple((leaf.shape, leaf.dtype) for leaf in tree_leaves(micro.inputs) if isinstance(leaf, Tensor))
        if key not in self._known:
            outputs = self._sketch.outputs_of(lambda model: self._forward(model, micro))
            self._known[key] = [(outputs[edge - 1].shape, outputs[edge - 1].dtype) for edge in self.edges[1:-1]]
        return self._known[key]

    def _reduce(self) -> None:
        """Weights that the first and the last stage share get the sum of both gradients; replicas their average."""
        for parameter in self.shared:
            self._add_partners(parameter)
        if self.sharded or self.layout.data_size == 1:
            return
        grads = [parameter.grad for parameter in self.names.parameters() if parameter.grad is not None]
        for dtype in {grad.dtype for grad in grads}:
            alike = [grad for grad in grads if grad.dtype == dtype]
            flat = torch.cat([grad.flatten() for grad in alike])
            dist.all_reduce(flat, group=self.layout.copies)
            flat /= self.layout.data_size
            for grad, part in zip(alike, flat.split([grad.numel() for grad in alike]), strict=True):
                grad.copy_(part.view_as(grad))

    @cached_property
    def shared(self) -> list[nn.Parameter]:
        """Weights of this rank that the stage at the other end of the pipeline holds too."""
        pieces: Any = self.pieces
        return [parameter for piece in pieces for parameter in piece.shared()]

    @cached_property
    def counted_elsewhere(self) -> set[int]:
        """Of those, the ids of the ones whose gradient the first stage counts in the norm."""
        return set() if self.layout.stage == 0 else {id(parameter) for parameter in self.shared}

    def _add_partners(self, parameter: nn.Parameter) -> None:
        grad = parameter.grad
        if grad is None:
            grad = parameter.grad = torch.zeros_like(parameter)
        mine = grad.to_local() if isinstance(grad, DTensor) else grad
        theirs = torch.empty_like(mine)
        last = self.layout.size("stage") - 1
        partner = dist.get_global_rank(self.group, last - self.layout.stage)
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, mine, partner, self.group), dist.P2POp(dist.irecv, theirs, partner, self.group)]
        )
        for work in works:
            work.wait()
        mine += theirs

    def norm_over_stages(self, norm: Tensor, count: int) -> list[Tensor]:
        """The norm of all stages together, and the sum of a count of each."""
        total = torch.stack([norm.square(), norm.new_tensor(count)])
        dist.all_reduce(total, group=self.group)
        return [total[0].sqrt(), total[1]]

    def of_all_stages(self, value: Any) -> list[Any]:
        """Every stage's value, plain data, on every stage."""
        return gather_plain(value, self.group, self.layout.world.device)

    # ---------------------------------------------------------------- evaluation

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The whole model, called like this."""

        def call(model: nn.Module) -> Any:
            return model(*args, **kwargs)

        if not self._looked:  # this way of calling the model may do other things after the blocks than the loss
            self._sketch.check(call)
            self._looked = True
        return self.through(call)

    def through(self, job: Callable[[nn.Module], Any]) -> Any:
        """A job with the whole model, one stage after the other; every stage gets the result."""
        stages = self.layout.size("stage")
        hidden: Any = None
        for number in range(self.count):
            here, there = number % stages, (number + 1) % stages
            if here == self.layout.stage:
                piece: Any = self.pieces[number // stages]
                hidden = piece(hidden, job=job)
            if number < self.count - 1 and here != there:
                hidden = self._hand_on(hidden, here, there)
        return broadcast_tree(
            hidden, dist.get_global_rank(self.group, stages - 1), self.group, self.layout.world.device
        )

    def _hand_on(self, hidden: Any, here: int, there: int) -> Any:
        """All stages come here, so that every one may know the shape; the tensor goes to one of them."""
        source, target = dist.get_global_rank(self.group, here), dist.get_global_rank(self.group, there)
        own = [list(hidden.shape), dtype_name(hidden.dtype)] if self.layout.stage == here else None
        shape, dtype = broadcast_plain(own, source, self.group, self.layout.world.device)
        if self.layout.stage == here:
            dist.send(hidden.contiguous(), dst=target, group=self.group)
        elif self.layout.stage == there:
            hidden = torch.empty(shape, dtype=getattr(torch, dtype), device=self.layout.world.device)
            dist.recv(hidden, src=source, group=self.group)
        return hidden


class TimedStage(PipelineStage):
    """PyTorch's stage, which tells its pipeline how long it computes."""

    pipeline: Pipeline

    @contextmanager
    def _busy(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.pipeline.busy += time.perf_counter() - began

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self._busy():
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self._busy():
            return super().backward_one_chunk(*args, **kwargs)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self._busy():
            return super().backward_weight_one_chunk(*args, **kwargs)
