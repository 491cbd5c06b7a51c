"""Dice, as a loss to train with and as a score to report.

With one foreground class the network has one output and a sigmoid; with several, one output per class and a softmax.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def sample_losses(logits: Tensor, mask: Tensor, *, cross_entropy: bool) -> Tensor:
    """One loss per sample, from nothing but that sample: a sum over them is the same however they are batched."""
    from monai.losses import DiceLoss

    logits = logits.float()
    binary = logits.shape[1] == 1
    # The background is nearly everything: counted as a class, it would hide the others.
    dice = DiceLoss(
        sigmoid=binary, softmax=not binary, to_onehot_y=not binary, include_background=binary, reduction="none"
    )
    losses = dice(logits, mask).flatten(1).mean(dim=1)
    return losses + _cross_entropy(logits, mask) if cross_entropy else losses


def predicted(logits: Tensor) -> Tensor:
    """The class of each voxel, [batch, 1, x, y, z]."""
    if logits.shape[1] == 1:
        return (logits > 0).to(torch.uint8)
    return logits.argmax(dim=1, keepdim=True).to(torch.uint8)


def dice_scores(prediction: Tensor, mask: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """[batch, foreground classes]: the score, and whether there is one. A class that neither the truth nor the
    prediction has is neither right nor wrong."""
    scores, counted = [], []
    for number in range(1, classes):
        found, true = ((volume == number).flatten(1) for volume in (prediction, mask))
        both = (found & true).sum(dim=1)
        total = found.sum(dim=1) + true.sum(dim=1)
        scores.append(2 * both / total.clamp(min=1))
        counted.append(total > 0)
    return torch.stack(scores, dim=1), torch.stack(counted, dim=1)


def _cross_entropy(logits: Tensor, mask: Tensor) -> Tensor:
    if logits.shape[1] == 1:
        voxels = F.binary_cross_entropy_with_logits(logits, mask.float(), reduction="none")
    else:
        voxels = F.cross_entropy(logits, mask[:, 0].long(), reduction="none")
    return voxels.flatten(1).mean(dim=1)
