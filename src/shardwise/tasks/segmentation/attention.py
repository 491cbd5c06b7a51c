"""Attention within the windows of SwinUNETR, without its scores in memory.

MONAI writes the scores of all pairs of voxels of all windows, several times over: 350 million of them in the first stage for two
volumes of 128×128×64. PyTorch's fused attention computes the same from pieces that stay on the chip. MONAI itself uses it where
no gradients are asked for.
"""

from __future__ import annotations

from monai.networks.nets.swin_unetr import WindowAttention
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

WITH_GRADIENTS_OF_THE_BIAS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""The others give none."""


def fuse_window_attention(network: nn.Module) -> nn.Module:
    """In place: weights and their names stay as they are."""
    for module in network.modules():
        if type(module) is WindowAttention:
            module.__class__ = FusedWindowAttention
    return network


def attends_within_windows(network: nn.Module) -> bool:
    return any(isinstance(module, WindowAttention) for module in network.modules())


class FusedWindowAttention(WindowAttention):
    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        rows, voxels, width = x.shape
        heads = self.num_heads
        bias = self._position_bias(voxels)
        queries, keys, values = self.qkv(x).view(rows, voxels, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
        if mask is not None:
            # Every window of a volume has a mask of its own, the same in all volumes: windows count as heads there, so that
            # one bias does for all volumes.
            windows = len(mask)
            bias = (bias + mask.unsqueeze(1)).flatten(0, 1)
            queries, keys, values = (
                each.reshape(rows // windows, windows * heads, voxels, -1) for each in (queries, keys, values)
            )
        dropout = self.attn_drop.p if self.training else 0.0
        with sdpa_kernel(WITH_GRADIENTS_OF_THE_BIAS):
            mixed = F.scaled_dot_product_attention(
                queries, keys, values, bias.to(queries.dtype).unsqueeze(0), dropout, scale=self.scale
            )
        mixed = mixed.reshape(rows, heads, voxels, -1).transpose(1, 2).reshape(rows, voxels, width)
        return self.proj_drop(self.proj(mixed))

    def _position_bias(self, voxels: int) -> Tensor:
        """heads × voxels × voxels."""
        places: Tensor = self.relative_position_index
        table: Tensor = self.relative_position_bias_table
        return table[places[:voxels, :voxels].reshape(-1)].view(voxels, voxels, -1).permute(2, 0, 1).contiguous()
