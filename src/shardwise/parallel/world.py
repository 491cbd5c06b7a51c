"""The ranks of this run: who they are, what device each has, and how they agree."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch.distributed.rendezvous import rendezvous

from shardwise.compat.distributed import HashStore, Store
from shardwise.errors import LaunchError, ShardwiseError
from shardwise.parallel.listening import tcp_store
from shardwise.parallel.membership import Member, call_roll
from shardwise.parallel.object_collectives import (
    as_json,
    broadcast_plain,
    error_heard,
    error_told,
    gather_bytes,
    gather_plain,
)

LETTING_GO = 0.01
"""Seconds, of which microseconds are needed."""


@dataclass
class World:
    rank: int
    size: int
    device: torch.device
    local_rank: int
    connected: bool
    """Whether a process group is up. One rank without strategy needs none."""
    group: dist.ProcessGroup | None = None
    """The connections it speaks over; without one, those that training uses too."""
    timeout: timedelta | None = None
    """How long a collective of training may take; None: as long as PyTorch lets it."""

    @classmethod
    def join(
        cls,
        device: str = "auto",
        *,
        connect: bool | None = None,
        timeout: timedelta | None = None,
        member: Callable[[torch.device], Member] | None = None,
    ) -> World:
        """Take this process's place among the ranks that torchrun, srun or shardwise itself started.

        `connect` forces a process group on a single rank too, as ddp and fsdp need. `member`: by what several ranks know
        that they belong together, and what this one runs on its device. Without it, nobody asks.
        """
        rank = int(os.environ.get("RANK", "0"))
        size = int(os.environ.get("WORLD_SIZE", "1"))
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        place = _device(device, local_rank)
        if connect is None:
            connect = size > 1
        if connect:
            # CPU tensors go over gloo on CUDA too: agreeing on counts and flags must not wait for the GPU.
            backend = "cpu:gloo,cuda:nccl" if place.type == "cuda" else "gloo"
            store = _store(rank, size, timeout or timedelta(minutes=5))
            if member is not None and size > 1:
                me = member(place)
                store = call_roll(store, me.key, rank, size, me.about, socket.gethostname(), _meeting_place())
            dist.init_process_group(
                backend,
                store=store,
                rank=rank,
                world_size=size,
                timeout=timeout,
                device_id=place if place.type == "cuda" else None,
            )
        return cls(rank, size, place, local_rank, connect, timeout=timeout)

    @classmethod
    def alone(cls) -> World:
        """One process that speaks with nobody."""
        return cls(0, 1, torch.device("cpu"), 0, connected=False)

    def apart(self) -> World:
        """The same ranks over connections of their own, for a thread that must not get in the way of training."""
        # It waits as long as the slowest disk takes.
        group = dist.new_group(backend="gloo", timeout=timedelta(hours=6)) if self.connected else None
        return replace(self, group=group)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum(self, *values: float) -> list[float]:
        """Add up host values over all ranks: the one small collective of every step."""
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, group=self.group)
        return tensor.tolist()

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank. It is plain data, as JSON knows it: a tuple comes back as a list."""
        return gather_plain(value, self.group) if self.size > 1 else [json.loads(as_json(value))]

    def gather_tensors(self, tensors: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        """The same for tensors on the host, of any sizes."""
        if self.size == 1:
            return [tensors]
        return [load(each) for each in gather_bytes(lambda: _as_bytes(tensors), self.group)]

    def from_first(self, value: Any) -> Any:
        """Rank 0's value, plain data, on every rank."""
        return broadcast_plain(value, group=self.group) if self.size > 1 else json.loads(as_json(value))

    def on_first(self, action: Callable[[], Any]) -> Any:
        """Run something on rank 0 alone. Every rank gets the plain data that it returned, or its error: nobody is left
        waiting."""
        value, problem = None, None
        if self.is_first:
            try:
                value = action()
            except (OSError, ShardwiseError) as error:
                problem = error
        value, told = self.from_first((value, error_told(problem)))
        if told is not None:
            raise problem or error_heard(told)
        return value

    def on_each_machine(self, action: Callable[[], None]) -> None:
        """Run something on one rank of every machine while the others wait. An error is raised on every rank."""
        problem: Exception | None = None
        if self.local_rank == 0:
            try:
                action()
            except (OSError, ShardwiseError) as error:
                problem = error
        if told := next((each for each in self.gather(error_told(problem)) if each is not None), None):
            raise problem or error_heard(told)

    def leave(self) -> None:
        if self.connected and dist.is_initialized():
            dist.destroy_process_group()
            # A thread of gloo may still have to let go of the last collective's tensors, for which it needs Python's lock: if the
            # interpreter ends meanwhile, it aborts the process (torch 2.13: "terminate called without an active exception").
            time.sleep(LETTING_GO)
        self.connected = False


def _as_bytes(tensors: dict[str, torch.Tensor]) -> bytes:
    try:
        return save({name: tensor.contiguous() for name, tensor in tensors.items()})
    except (ValueError, RuntimeError, KeyError) as error:  # sparse ones, or a type it has no name for
        raise ShardwiseError(f"tensors that cannot be sent to the other ranks: {error}") from error


def _store(rank: int, size: int, timeout: timedelta) -> Store:
    """Where the ranks find each other. PyTorch's own listens on every network of the machine (torch 2.13); here it is the one
    of the address that was given."""
    if size == 1 and "MASTER_ADDR" not in os.environ:
        return HashStore()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or "MASTER_PORT" not in os.environ:
        return next(rendezvous("env://", rank, size, timeout=timeout))[0]  # torchrun's agent listens
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # Nobody is waited for: a stranger who connects would count, too.
    return tcp_store(address, port, hosts=rank == 0, timeout=timeout)


def _meeting_place() -> str:
    return f"{os.environ.get('MASTER_ADDR', 'the rendezvous')}:{os.environ.get('MASTER_PORT', '')}"


def _device(wanted: str, local_rank: int) -> torch.device:
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    available = torch.cuda.device_count()
    if not available:
        raise LaunchError("training.device: cuda, but PyTorch finds no CUDA device on this machine; use device: cpu")
    if local_rank >= available:
        raise LaunchError(
            f"local rank {local_rank} has no GPU: this machine has {available}. Start at most {available} ranks per machine"
        )
    # Pinned memory, which checkpoints are copied into, is taken four times as fast by several threads (torch 2.11, H200).
    # Segments that grow keep memory whole: a 6.7B model lost 22 of 139 GiB to gaps without them.
    settings = "expandable_segments:True,pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", settings)
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device
