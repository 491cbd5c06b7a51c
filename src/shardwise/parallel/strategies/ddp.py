"""A whole copy of the model on every rank; gradients are averaged while the backward pass still runs (DDP)."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardwise.compat.distributed import GradBucket, release_ddp
from shardwise.config import Ddp
from shardwise.kernels.low_precision_weights import LowPrecisionWeights
from shardwise.parallel.advice import Question, Suggestion
from shardwise.parallel.compression import PowerSGD, compress, gradient_bytes
from shardwise.parallel.layout import Layout
from shardwise.parallel.memory import Remedy, Shortage, short_bytes
from shardwise.parallel.recipe import ModelSpec, copies_dtype, has_synced_batch_norm, whole_model
from shardwise.parallel.strategies.fsdp import sharded_instead
from shardwise.parallel.strategy import Devices, Strategy, strategy_class
from shardwise.parallel.weights import broadcast_buffers, broadcast_parameters
from shardwise.parallel.world import World


class DistributedDataParallelStrategy(Strategy):
    name = "ddp"
    compresses_gradients = True
    unused_remedy = "Set training.ddp.find_unused_parameters: true, or "
    extra_state_lost = "the checkpoint has no memory of powersgd for this number of ranks: it starts anew"

    model: DistributedDataParallel
    memory: PowerSGD | None = None
    """What compressed gradients left out so far; it belongs into a checkpoint."""

    @property
    def options(self) -> Ddp:
        return self.training.ddp

    # ---------------------------------------------------------------- before a launch

    def refusals(self, devices: Devices) -> Iterator[str]:
        yield from super().refusals(devices)
        if self.options.comm_hook == "bf16" and devices.kind == "cpu":
            yield "training.ddp.comm_hook: bf16 needs NCCL; between CPU ranks fp16 does the same"
        if self.options.static_graph and devices.micro_batches > 1:
            yield "training.ddp.static_graph does not go with gradient accumulation (torch 2.13 fails)"

    def suggestions(self, question: Question) -> Iterator[Suggestion]:
        if question.machines.devices > 1:
            yield Suggestion(
                self.name,
                [f"strategy: {self.name}"],
                self.held_bytes(question.sizes, question.machines.devices),
                why="ddp is then fastest: it only adds up gradients, while the backward pass still runs. For the largest batch, "
                "fsdp with gradient accumulation frees more memory.",
            )

    def lighter(self, shortage: Shortage) -> Iterator[Remedy]:
        ranks = shortage.ranks
        if ranks > 1:
            zero1 = strategy_class("zero1")(self.training)
            saves = self.held_bytes(shortage.sizes, ranks).total - zero1.held_bytes(shortage.sizes, ranks).total
            yield Remedy(f"training.strategy: zero1 over {ranks} devices (the optimizer state is shared)", saves)
        yield from sharded_instead(self, shortage)

    # ---------------------------------------------------------------- the model

    def wrap(self, spec: ModelSpec, layout: Layout) -> None:
        self.layout, world = layout, layout.world
        self.module, self.regions = whole_model(spec, self.training, world)
        broadcast_buffers(self.module, dict(self.module.named_buffers()), world)
        dtype = copies_dtype(spec, self.training, self.module)
        if dtype and _reaches_masters(self.options):
            broadcast_parameters(self.module, world)  # DDP will see the copies only
            self.low_precision = LowPrecisionWeights(self.module, dtype)
        with self.computing():
            self.model = replicate(self.module, self.options, world)
        if self.low_precision is not None:
            # A lambda: PyTorch looks at the annotations, and does not know them as text (torch 2.13).
            self.model.register_comm_hook(self.low_precision, lambda copies, bucket: _reduce_to_masters(copies, bucket))
        else:
            self.memory = compress(self.model, self.options)

    @property
    def alone(self) -> nn.Module:
        return self.module  # without DDP around it nothing is reduced

    @property
    def waits_for_others(self) -> bool:
        return self.layout.world.size > 1 and has_synced_batch_norm(self.module)

    def release(self) -> None:
        release_ddp(self.model)

    # ---------------------------------------------------------------- one step

    @contextmanager
    def reducing_gradients(self, last: bool = True, *, only: bool = False) -> Iterator[None]:
        copies = self.low_precision
        if copies is not None:
            copies.collecting = not (only and self.updates_from_copies)
        with nullcontext() if last else self.model.no_sync():
            yield
        if copies is not None:
            if last:
                copies.drop()  # they were reduced onto the masters
            elif copies.collecting:
                copies.collect()

    @property
    def needs_every_gradient(self) -> bool:
        """DDP leaves a bucket unreduced, without a word, while one of its parameters waits for a gradient."""
        return not self.options.find_unused_parameters

    # ---------------------------------------------------------------- checkpoints

    @property
    def needs_rehearsal(self) -> bool:
        """DDP decides after its first backward pass which gradients travel together."""
        return self.memory is not None or self.layout.world.size > 1

    def extra_state(self) -> dict[str, Tensor] | None:
        return self.memory.tensors() if self.memory is not None else None

    def load_extra_state(self, tensors: dict[str, Tensor]) -> bool:
        return self.memory is None or self.memory.restore(tensors)

    def forget_extra_state(self) -> None:
        if self.memory is not None:
            self.memory.forget()

    # ---------------------------------------------------------------- what the log says

    def notes(self, micro_batches: int) -> Iterator[str]:
        if self.options.comm_hook != "none":
            before, after = gradient_bytes(self.module, self.options)
            yield (
                f"gradients travel compressed ({self.options.comm_hook}): {short_bytes(after)} per step and rank instead of "
                f"{short_bytes(before)}, {1 - after / before:.0%} less; the numbers are not those of whole gradients"
            )


def replicate(module: nn.Module, options: Ddp, world: World) -> DistributedDataParallel:
    # A buffer outside the state dict is a constant: only running statistics are worth sending before every forward.
    changing = set(module.state_dict()) - {name for name, _ in module.named_parameters(remove_duplicate=False)}
    return DistributedDataParallel(
        module,
        device_ids=[world.device.index] if world.device.type == "cuda" else None,
        bucket_cap_mb=_bucket(module, options, world),
        find_unused_parameters=options.find_unused_parameters,
        static_graph=options.static_graph,
        gradient_as_bucket_view=options.gradient_as_bucket_view,
        **{_BUFFER_OPTION: bool(changing)},  # type: ignore[arg-type]
    )


# torch 2.13 renames DDP's option and warns about the old name; 2.11 knows only that.
_BUFFER_OPTION = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)


def _bucket(module: nn.Module, options: Ddp, world: World) -> float:
    """In MB. PowerSGD answers one collective with the next; over gloo those of several buckets get into each other's way
    (torch 2.13: a hang), so all gradients travel in one."""
    if options.comm_hook != "powersgd" or world.device.type == "cuda":
        return options.bucket_cap_mb
    return 1 + sum(parameter.numel() * parameter.element_size() for parameter in module.parameters()) / 2**20


def _reaches_masters(options: Ddp) -> bool:
    """Whether gradients of low-precision copies can get to fp32 masters: not where a hook of PyTorch's own handles them, or
    where DDP finds out only afterwards which of them there are."""
    return options.comm_hook == "none" and not options.find_unused_parameters


def _reduce_to_masters(copies: LowPrecisionWeights, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Gradients of low-precision copies are added up in fp32, over the ranks and with those of earlier micro-batches, and left on
    the masters; what DDP has of them is of no further use."""
    arrived = bucket.buffer()
    summed = arrived.to(torch.promote_types(arrived.dtype, torch.float32))
    to_masters, to_ddp = [], []
    for parameter, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
        place = grad.storage_offset() - arrived.storage_offset()
        master, part = copies.master_of(parameter), summed.as_strided(grad.shape, grad.stride(), place)
        if master is parameter:  # it has no copy, and DDP brings its earlier gradients along
            to_ddp.append((grad, part))
            continue
        to_masters.append((master, part))
        if master.grad is not None:
            part += master.grad
    summed /= dist.get_world_size()

    def leave(_: Any) -> torch.Tensor:
        for master, part in to_masters:
            master.grad = part
        if summed is not arrived:
            for grad, part in to_ddp:
                grad.copy_(part)
        return arrived

    return dist.all_reduce(summed, async_op=True).get_future().then(leave)
