"""What type the arithmetic runs in."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from shardwise.kernels.types import COMPUTE_TYPES


@dataclass(frozen=True)
class Precision:
    name: str
    device_type: str

    def set_backends(self) -> None:
        """32-true means fp32: by default PyTorch lets cuDNN round the inputs of convolutions to ten binary digits (TF32)."""
        if self.name == "32-true" and self.device_type == "cuda":
            torch.backends.cudnn.allow_tf32 = False

    def autocast(self) -> AbstractContextManager[None]:
        """Matrix products in the narrow type, sensitive operations (norms, softmax, losses) in fp32.

        bf16-true has buffers in fp32 (statistics, rotary frequencies): what they touch comes back to bf16 by it.
        """
        dtype = COMPUTE_TYPES.get(self.name)
        if dtype is None:
            return nullcontext()
        return torch.autocast(self.device_type, dtype=dtype)

    def scaler(self) -> torch.amp.GradScaler:
        """fp16 gradients underflow unless the loss is scaled up; bf16 and fp32 need no scaler."""
        return torch.amp.GradScaler(self.device_type, enabled=self.name == "16-mixed")
