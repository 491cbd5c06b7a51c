"""Random weights of large models, drawn by all cores.

PyTorch fills a tensor with random numbers on one core: a billion weights take ten seconds, and twice that where a model puts
its own in the place of those that its layers came with. Here a large tensor is filled in pieces, by several threads, each from
a generator of its own whose seed the usual generator gave. What is drawn follows from the seed alone: neither the number of
threads nor the device that the model will be on changes it.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.compat.tensors import TorchDispatchMode
from shardwise.config.seeds import Purpose
from shardwise.data.seeding import seed_everything
from shardwise.tasks import Task

LARGE = 2**22
"""Numbers in a tensor from which on it is filled in pieces; below, it is filled as PyTorch does."""
PIECE = 2**19
_FILLS = {torch.ops.aten.normal_.default: Tensor.normal_, torch.ops.aten.uniform_.default: Tensor.uniform_}
"""Whoever asks for random numbers ends there, through whatever function: that is where they are caught."""


def build_initial_model(task: Task, seed: int) -> nn.Module:
    """As the task builds it, the same on every rank."""
    seed_everything(seed, Purpose.WEIGHTS)
    with ParallelInit():
        return task.build_model()


class ParallelInit(TorchDispatchMode):
    """While a model is built within it, that is how its large tensors are filled."""

    def __enter__(self) -> ParallelInit:
        self._threads = ThreadPoolExecutor(torch.get_num_threads(), "weights")
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._threads.shutdown()

    def __torch_dispatch__(self, operation: Any, types: Iterable[type], args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if operation in _FILLS and kwargs.get("generator") is None and _is_large(args[0]):
            self._fill(operation, *args, **kwargs)
            return args[0]
        return operation(*args, **kwargs)

    def _fill(self, operation: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        first_seed = int(torch.randint(2**32, ()))
        given = {name: value for name, value in kwargs.items() if name != "generator"}

        def fill(number: int, piece: Tensor) -> None:
            _FILLS[operation](piece, *args, generator=torch.Generator().manual_seed(first_seed + number), **given)

        pieces = tensor.view(-1).split(PIECE)
        for filled in [self._threads.submit(fill, *each) for each in enumerate(pieces)]:
            filled.result()


def _is_large(tensor: Any) -> bool:
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.numel() >= LARGE
        and tensor.is_contiguous()
    )
