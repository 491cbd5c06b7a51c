"""Dropout draws differently on every rank, by design; with it off, every other difference shows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


def switch_off_dropout() -> None:
    """In this process, for every module that goes through torch.nn.functional."""
    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"):
        setattr(functional, name, _as_it_is)
    attention = functional.scaled_dot_product_attention

    def without_dropout(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
        if "dropout_p" in options:
            options["dropout_p"] = 0.0
        if len(args) > 1:  # attn_mask, dropout_p, …
            args = (args[0], 0.0, *args[2:])
        return attention(query, key, value, *args, **options)

    functional.scaled_dot_product_attention = without_dropout
    torch.dropout = _as_it_is


def switch_off_in(model: nn.Module) -> None:
    """Recurrent layers draw in the library itself."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.dropout = 0.0


def _as_it_is(input: Tensor, *args: Any, **options: Any) -> Tensor:
    return input
