"""PyTorch's compiler: its limits, its counters, its errors. It takes seconds to import, so nothing here imports it before it is
asked for."""

from __future__ import annotations

import importlib
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def import_compiler() -> None:
    """Ahead of its first use, which is the first step of any optimizer. Seen on 2.11, 2.13, 2.15."""
    importlib.import_module("torch._dynamo")


def compile_errors() -> type[Exception]:
    """What is raised where code cannot be compiled, for `except`. Seen on 2.11, 2.13, 2.15."""
    return torch._dynamo.exc.TorchDynamoException


def allow_recompiles(number: int) -> None:
    """A function is compiled for at least so many kinds of input before it runs as it is. Seen on 2.11, 2.13, 2.15."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, number)


def compile_backward_early() -> None:
    """Backward passes are compiled with the forward, so that one which cannot be is known before any gradient is there.
    Seen on 2.11, 2.13, 2.15; a version without it compiles them late."""
    if hasattr(torch._functorch.config, "force_non_lazy_backward_lowering"):
        torch._functorch.config.force_non_lazy_backward_lowering = True


def compiled_frames() -> int:
    """How many functions have been compiled so far in this process. Seen on 2.11, 2.13, 2.15."""
    return int(torch._dynamo.utils.counters["frames"]["total"])


def uncompiled() -> AbstractContextManager[Any]:
    """What is compiled runs as it is in here, and nothing is compiled. Where the compiler has not been imported, nothing is
    compiled yet. Seen on 2.11, 2.13, 2.15."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def name_without_compiled(name: str) -> str:
    """The name that a parameter had before `torch.compile` was given its module. Seen on 2.11, 2.13, 2.15."""
    return name.replace("_orig_mod.", "")
