"""Matrix products in eight bits (Hopper and newer): twice the rate of bf16, and half the bytes.

A number of eight bits has two or three digits, so every tensor is scaled to use them all: by its largest number (per
tensor, the fastest). Activations and weights are e4m3 (more digits), gradients e5m2 (more range). Sums are fp32, results
bf16. Embeddings, norms and the head stay as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shardwise.compat.tensors import scaled_mm
from shardwise.kernels.types import computing_type

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16
"""Matrices whose sides are no multiples of this are left out: the hardware cannot take them."""


def use_fp8(model: nn.Module, blocks: list[nn.Module]) -> list[str]:
    """The linear layers of the blocks compute in fp8 from now on, in place, with the same names and weights.

    Returns the names of those that were left out because of their sides.
    """
    names = {module: name for name, module in model.named_modules()}
    skipped = []
    for block in blocks:
        for module in block.modules():
            if type(module) is not nn.Linear:
                continue
            if module.in_features % MULTIPLE or module.out_features % MULTIPLE:
                skipped.append(names.get(module, "?"))
            else:
                module.__class__ = Fp8Linear
    return skipped


def fp8_problem(device: torch.device) -> str | None:
    """Why this device cannot compute in fp8."""
    if device.type != "cuda":
        return "it needs a GPU"
    if torch.cuda.get_device_capability(device) < (8, 9):
        return f"{torch.cuda.get_device_name(device)} has no fp8 units (Hopper and Ada are the first that do)"
    return None


class Fp8Linear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        dtype = computing_type(input)
        rows = input.to(dtype).flatten(0, -2)
        if len(rows) % MULTIPLE:  # as many rows as the hardware takes; those that are added are zero
            rows = nn.functional.pad(rows, (0, 0, 0, -len(rows) % MULTIPLE))
        product: Tensor = _Fp8Product.apply(rows, self.weight.to(dtype))
        result = product[: input.numel() // input.shape[-1]].unflatten(0, input.shape[:-1])
        return result if self.bias is None else result + self.bias.to(dtype)


class _Fp8Product(torch.autograd.Function):
    """rows @ weight.T, and both products of its backward pass, in fp8."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return _product(_scaled(rows, FORWARD), _scaled(weight, FORWARD, transposed=True), rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        rows, weight = ctx.saved_tensors
        narrow = _scaled(gradient, BACKWARD)
        # The hardware wants the first matrix row by row and the second column by column.
        to_rows = _product(narrow, _by_columns(_scaled(weight, FORWARD)), rows.dtype)
        to_weight = _product(_transposed(narrow), _by_columns(_scaled(rows, FORWARD)), weight.dtype)
        return to_rows, to_weight


Scaled = tuple[Tensor, Tensor]
"""Numbers of eight bits, and what to multiply them with to get the true ones."""


def _scaled(tensor: Tensor, dtype: torch.dtype, *, transposed: bool = False) -> Scaled:
    largest = tensor.abs().amax().float().clamp(min=1e-12)
    scale = torch.finfo(dtype).max / largest
    narrow = (tensor.float() * scale).to(dtype)
    return (narrow.t() if transposed else narrow), scale.reciprocal()


def _transposed(scaled: Scaled) -> Scaled:
    return scaled[0].t().contiguous(), scaled[1]


def _by_columns(scaled: Scaled) -> Scaled:
    return scaled[0].t().contiguous().t(), scaled[1]


def _product(left: Scaled, right: Scaled, dtype: torch.dtype) -> Tensor:
    return scaled_mm(
        left[0], right[0], scale_a=left[1], scale_b=right[1], out_dtype=dtype, use_fast_accum=left[0].dtype == FORWARD
    )
