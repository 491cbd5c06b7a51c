"""What type the arithmetic runs in."""

from __future__ import annotations

import torch
from torch import Tensor

COMPUTE_TYPES = {
    "bf16-mixed": torch.bfloat16,
    "fp8-mixed": torch.bfloat16,
    "bf16-true": torch.bfloat16,
    "16-mixed": torch.float16,
}
"""That of each precision; fp32 where it is not named."""


def computing_type(tensor: Tensor) -> torch.dtype:
    """What a product with this tensor would be computed in: autocast's type where it is on, else its own."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype
