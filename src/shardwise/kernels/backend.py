"""Which of PyTorch's attention kernels is fastest for a shape on this GPU: measured once, then remembered.

Kernels differ in rounding, so a resumed run must use the one that it began with: the remembered answer sees to that.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
_ORDERS = {
    name: [first, *(other for other in BACKENDS.values() if other != first), SDPBackend.MATH]
    for name, first in BACKENDS.items()
}
_REPEATS = 5
_WARM_UP = 3


@dataclass(frozen=True)
class Shape:
    """Of attention in training."""

    batch: int
    heads: int
    kv_heads: int
    length: int
    head_dim: int
    dtype: torch.dtype
    causal: bool = True

    def __str__(self) -> str:
        sizes = f"{self.batch}x{self.heads}/{self.kv_heads}x{self.length}x{self.head_dim} {self.dtype}"
        return sizes if self.causal else f"{sizes} both ways"


def in_order(name: str) -> list[SDPBackend]:
    """This one first; where it cannot, the others."""
    return _ORDERS[name]


def fastest_backend(shape: Shape, remembered: Path) -> str | None:
    """A name of BACKENDS, measured on the current CUDA device and remembered in that file; None where no kernel takes it."""
    known, key = _read(remembered), _key(shape)
    if key in known:
        return known[key]
    times = {name: took for name in BACKENDS if (took := _measure(shape, name)) is not None}
    fastest = min(times, key=times.__getitem__, default=None)
    _write(remembered, {**_read(remembered), key: fastest})
    return fastest


def remembered_backend(shape: Shape, remembered: Path) -> str | None:
    """What was measured before for this shape, on a GPU like this one."""
    return _read(remembered).get(_key(shape))


def _measure(shape: Shape, name: str) -> float | None:
    """Milliseconds of forward and backward; None: this kernel does not take the shape."""
    # Efficient attention does not take fewer key heads than query heads (torch 2.13): they are repeated, as in training.
    kv_heads = shape.heads if name == "efficient" else shape.kv_heads

    def some(heads: int) -> torch.Tensor:
        made = torch.randn(shape.batch, shape.length, heads, shape.head_dim, device="cuda", dtype=shape.dtype)
        return made.transpose(1, 2).requires_grad_()

    query, key, value = some(shape.heads), some(kv_heads), some(kv_heads)
    gradient = torch.randn_like(query)

    def once() -> None:
        with sdpa_kernel(BACKENDS[name]):
            found = F.scaled_dot_product_attention(
                query, key, value, is_causal=shape.causal, enable_gqa=kv_heads != shape.heads
            )
        torch.autograd.grad(found, (query, key, value), gradient)

    try:
        for _ in range(_WARM_UP):
            once()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(_REPEATS):
            once()
        end.record()
        end.synchronize()
    except RuntimeError:  # "No available kernel", or out of memory
        return None
    return begin.elapsed_time(end) / _REPEATS


def _key(shape: Shape) -> str:
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {shape}"


def _read(path: Path) -> dict[str, str | None]:
    try:
        known = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(known, dict):
        return {}
    return {key: name for key, name in known.items() if name is None or name in BACKENDS}


def _write(path: Path, known: dict[str, str | None]) -> None:
    """A folder that cannot be written to is no reason not to train: PyTorch's own choice is used then."""
    aside = path.with_name(f".{os.getpid()}-{path.name}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(json.dumps(known, indent=1, sort_keys=True))
        aside.rename(path)
