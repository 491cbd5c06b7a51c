"""A whole copy of the model on every rank, trained by itself; every few steps the copies' weights are averaged (local SGD).

Moments stay each rank's own: they follow its own gradients, and to average Adam's too would send three times as much. What is
evaluated and saved is the average, of the moments too. The ranks train on with what they had: when a run is evaluated, saved
or killed does not change its numbers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from pydantic import Field
from torch import Tensor, nn

from shardwise.compat.distributed import name_without_wrapper
from shardwise.config import Block, Training
from shardwise.kernels.low_precision_weights import LowPrecisionWeights
from shardwise.parallel.layout import Layout
from shardwise.parallel.memory import Remedy, Shortage, short_bytes
from shardwise.parallel.recipe import ModelSpec, copies_dtype, whole_model
from shardwise.parallel.strategies.fsdp import sharded_instead
from shardwise.parallel.strategy import Devices, Strategy
from shardwise.parallel.weights import broadcast_buffers, broadcast_parameters

AT_ONCE = 2**26
"""Bytes that are averaged together: one tensor at a time, a slow link would wait for each."""


class Options(Block):
    every: int = Field(8, ge=1, description="Updates of each rank by its own gradients, from one average to the next.")


class LocalSgd(Strategy):
    name = "local_sgd"
    block = Options
    scales_loss = False
    unequal = (
        "every rank updates its own weights by its own gradients, and they are averaged every few steps: gradients, norms, "
        "losses and weights are not those of one process. With every: 1, sgd and no clipping, losses and weights are"
    )
    extra_state_lost = (
        "the checkpoint has no weights and moments of each of this many ranks: all of them go on from the same ones"
    )

    optimizer: torch.optim.Optimizer

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self.updates = 0
        """Since the last average; 0: all ranks have the same weights. Skipped steps are none."""
        self._own: dict[str, Tensor] | None = None
        """What this rank has for itself, while the average is in its place."""

    # ---------------------------------------------------------------- before a launch

    def refusals(self, devices: Devices) -> Iterator[str]:
        yield from super().refusals(devices)
        if self.training.sync_batch_norm:
            yield (
                f"training.sync_batch_norm: true does not go with strategy {self.name}: between two averages the ranks exchange "
                "nothing, and have different weights; leave it out, or use ddp"
            )

    def lighter(self, shortage: Shortage) -> Iterator[Remedy]:
        return sharded_instead(self, shortage)

    # ---------------------------------------------------------------- the model

    def wrap(self, spec: ModelSpec, layout: Layout) -> None:
        self.layout = layout
        own_batch_norm = self.training.model_copy(update={"sync_batch_norm": False})
        self.module, self.regions = whole_model(spec, own_batch_norm, layout.world)
        self.model = self.module
        broadcast_parameters(self.module, layout.world)
        broadcast_buffers(self.module, dict(self.module.named_buffers()), layout.world)
        if dtype := copies_dtype(spec, self.training, self.module):
            self.low_precision = LowPrecisionWeights(self.module, dtype)
            self.low_precision.collect_as_they_come()

    @property
    def waits_for_others(self) -> bool:
        return False

    def make_optimizer(
        self, kind: Callable[..., torch.optim.Optimizer], groups: list[dict[str, Any]], settings: dict[str, Any]
    ) -> torch.optim.Optimizer:
        self.optimizer = super().make_optimizer(kind, groups, settings)
        return self.optimizer

    @contextmanager
    def one_model(self, *, moments: bool = False) -> Iterator[None]:
        if self.layout.world.size == 1:
            yield
            return
        buffers, averaged = self._buffers(), self._moments() if moments else {}
        if self.updates:
            averaged |= self._weights()
        places = [*buffers.values(), *averaged.values()]
        self._own = {name: tensor.data for name, tensor in self._owned().items()}
        own = [place.data for place in places]
        try:
            for buffer in buffers.values():
                buffer.data = buffer.data.clone()
            self.share_buffers()
            for place, mean in self._means(averaged.values()):
                place.data = torch.empty_like(place).copy_(mean)
            yield
        finally:
            if self.layout.world.device.type == "cuda":  # a checkpoint may still be copied out of the average
                torch.cuda.synchronize(self.layout.world.device)
            for place, mine in zip(places, own, strict=True):
                place.data = mine
            self._own = None

    # ---------------------------------------------------------------- one step

    def gradient_norm(self, parameters: Sequence[nn.Parameter], step: int) -> Tensor:
        """The root mean square of the ranks' norms. All clip by the same factor, so that the mean of their gradients keeps its
        direction; and a gradient that is no number on one rank is none on any."""
        norm, size = super().gradient_norm(parameters, step), self.layout.world.size
        if size == 1:
            return norm
        squares = norm.double().square()
        dist.all_reduce(squares)
        return (squares / size).sqrt().to(norm.dtype)

    def after_update(self, step: int) -> None:
        self.updates += 1
        if self.updates >= self.options.every:
            if self.layout.world.size > 1:
                for weight, mean in self._means(self._weights().values()):
                    weight.data.copy_(mean)
                self.share_buffers()
            self.updates = 0

    def _means(self, tensors: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Each of them, and its average over the ranks, in fp32 at least."""
        for bucket in _buckets(tensors):
            wide = torch.promote_types(bucket[0].dtype, torch.float32)
            flat = torch.cat([each.data.reshape(-1).to(wide) for each in bucket])
            dist.all_reduce(flat)
            flat /= self.layout.world.size
            parts = flat.split([each.numel() for each in bucket])
            yield from ((each, part.view(each.shape)) for each, part in zip(bucket, parts, strict=True))

    # ---------------------------------------------------------------- checkpoints

    def _weights(self) -> dict[str, Tensor]:
        return {f"weights.{name}": each for name, each in self._trained()}

    def _moments(self) -> dict[str, Tensor]:
        states = [(name, self.optimizer.state[parameter]) for name, parameter in self._trained()]
        return {
            f"moments.{name}.{key}": value
            for name, state in states
            for key, value in state.items()
            if isinstance(value, Tensor) and value.is_floating_point()
        }

    def _buffers(self) -> dict[str, Tensor]:
        return {f"buffers.{name}": buffer for name, buffer in self.running_buffers().items()}

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        named = self.module.named_parameters()
        return [(name_without_wrapper(name), each) for name, each in named if each.requires_grad]

    def _owned(self) -> dict[str, Tensor]:
        return self._weights() | self._moments() | self._buffers()

    def extra_state(self) -> dict[str, Tensor] | None:
        if self.layout.world.size == 1:
            return None
        own = self._own if self._own is not None else {name: each.data for name, each in self._owned().items()}
        return {**own, "updates": torch.tensor(self.updates)}

    def load_extra_state(self, tensors: dict[str, Tensor]) -> bool:
        places = self._owned()
        if tensors.keys() != {*places, "updates"}:
            return False
        for name, place in places.items():
            place.data.copy_(tensors[name])
        self.updates = int(tensors["updates"])
        return True

    # ---------------------------------------------------------------- what the log says

    def notes(self, micro_batches: int) -> Iterator[str]:
        if self.layout.world.size == 1:
            yield f"{self.name} on one rank: there is nobody to average weights with"
            return
        every = self.options.every
        trained = [each for _, each in self._trained()]
        gradients = sum(each.nbytes for each in trained)
        sent = sum(each.numel() * max(4, each.element_size()) for each in trained) / every
        yield (
            f"weights are averaged every {every} step(s): {short_bytes(sent)} per step and rank on average, where ddp hands over "
            f"{short_bytes(gradients)} of gradients; the numbers are not those of ddp"
        )


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Of one device and type, in their order."""
    open_ones: dict[object, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        bucket = open_ones[tensor.device, tensor.dtype]
        if bucket and sum(each.nbytes for each in bucket) + tensor.nbytes > AT_ONCE:
            yield bucket
            open_ones[tensor.device, tensor.dtype] = bucket = []
        bucket.append(tensor)
    yield from open_ones.values()
