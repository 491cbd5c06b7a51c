"""One contender after the other in one process, each as if it were alone in it."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from benchmarks.gpu.contenders.meter import Meter
from benchmarks.gpu.contenders.problem import DEVICE, Contender, Row

PEERS = {
    "Accelerate": ({"accelerate"},),
    "Lightning": ({"lightning", "pytorch_lightning"},),
    "Transformers Trainer": ({"transformers"}, {"accelerate"}),
}
"""Packages that the contenders of other tools need, by the beginning of their names: one of each set."""


def take_turn(contender: Contender) -> Row:
    """A contender that fails, or that is not installed, has a row that says so; the others go on."""
    if missing := _not_installed(contender.name):
        return Row(contender, failed=f"not installed: {', '.join(missing)}")
    with _apart():
        try:
            meter = Meter(contender.plan, DEVICE)
            contender.run(meter)
            return Row(contender, meter.figures())
        except Exception as error:
            # The frames hold the model, and with it the memory that the next contender needs.
            traceback.clear_frames(error.__traceback__)
            return Row(contender, failed=_first_line(error))


def _not_installed(name: str) -> list[str]:
    needed = next((packages for tool, packages in PEERS.items() if name.startswith(tool)), ())
    return [min(each) for each in needed if not any(importlib.util.find_spec(package) for package in each)]


@contextmanager
def _apart() -> Iterator[None]:
    """Whatever a contender changes for the whole process is undone, and its memory freed."""
    environment = dict(os.environ)
    flags = _flags()
    _free()
    try:
        yield
    finally:
        if dist.is_initialized():  # a Session that failed leaves its group to the end of the process
            dist.destroy_process_group()
        if (
            "accelerate.state" in sys.modules
        ):  # the Trainer's too; a second Accelerator would take over the first one's settings
            from accelerate.state import AcceleratorState, GradientState

            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()
        os.environ.clear()
        os.environ.update(environment)
        _set_flags(flags)
        _free()
        if DEVICE.type == "cuda" and (held := torch.cuda.memory_allocated() / 2**30) > 1:
            print(f"warning: {held:.1f} GiB are still held", file=sys.stderr, flush=True)


def _free() -> None:
    if "torch._dynamo" in sys.modules:  # to import it takes seconds
        torch.compiler.reset()
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()
        if hasattr(torch._C, "_host_emptyCache"):
            torch._C._host_emptyCache()  # pinned memory, of which checkpoints take as much as there are weights and moments


def _flags() -> tuple[bool, ...]:
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    attention = (
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
    )
    return cudnn.benchmark, cudnn.deterministic, *attention


def _set_flags(flags: tuple[bool, ...]) -> None:
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    cudnn.benchmark, cudnn.deterministic, flash, efficient, math, attention = flags
    cuda.enable_flash_sdp(flash)
    cuda.enable_mem_efficient_sdp(efficient)
    cuda.enable_math_sdp(math)
    cuda.enable_cudnn_sdp(attention)


def _first_line(error: Exception) -> str:
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {said}"[:200]
