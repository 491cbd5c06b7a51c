"""The loss against one written by hand, and the scores against counting."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardwise.tasks.segmentation.dice import dice_scores, predicted, sample_losses


def some(classes: int, batch: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(classes)
    outputs = 1 if classes == 2 else classes
    logits = torch.randn(batch, outputs, 5, 4, 3, generator=generator)
    return logits, torch.randint(0, classes, (batch, 1, 5, 4, 3), generator=generator, dtype=torch.uint8)


def by_hand(logits: Tensor, mask: Tensor, cross_entropy: bool) -> Tensor:
    """1 − 2·Σpt / (Σp + Σt) for each foreground class, averaged; and −log p of the true class, averaged over voxels."""
    losses = []
    for scores, truth in zip(logits, mask[:, 0], strict=True):
        if len(scores) == 1:
            foreground = 1 / (1 + torch.exp(-scores[0]))
            probabilities = torch.stack([1 - foreground, foreground])
        else:
            probabilities = torch.exp(scores) / torch.exp(scores).sum(dim=0)
        dice = []
        for number in range(1, len(probabilities)):
            true = (truth == number).float()
            both = (probabilities[number] * true).sum()
            dice.append(1 - (2 * both + 1e-5) / (probabilities[number].sum() + true.sum() + 1e-5))
        loss = torch.stack(dice).mean()
        if cross_entropy:
            loss = loss - torch.log(probabilities.gather(0, truth[None].long())).mean()
        losses.append(loss)
    return torch.stack(losses)


@pytest.mark.parametrize("cross_entropy", [False, True])
@pytest.mark.parametrize("classes", [2, 3, 5])
def test_the_loss_is_the_one_written_by_hand(classes: int, cross_entropy: bool) -> None:
    logits, mask = some(classes)
    losses = sample_losses(logits, mask, cross_entropy=cross_entropy)
    torch.testing.assert_close(losses, by_hand(logits, mask, cross_entropy))


@pytest.mark.parametrize("classes", [2, 4])
def test_the_loss_of_a_batch_is_the_sum_of_its_samples_and_so_is_the_gradient(classes: int) -> None:
    logits, mask = some(classes, batch=4)
    together, alone = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    whole = sample_losses(together, mask, cross_entropy=True).sum()
    parts = [sample_losses(alone[i : i + 1], mask[i : i + 1], cross_entropy=True).sum() for i in range(4)]
    whole.backward()
    sum(parts).backward()  # type: ignore[union-attr]
    torch.testing.assert_close(whole, torch.stack(parts).sum())
    torch.testing.assert_close(together.grad, alone.grad)


def test_scores_are_twice_the_overlap_over_the_sizes() -> None:
    mask = torch.zeros(1, 1, 4, 4, 1, dtype=torch.uint8)
    found = mask.clone()
    mask[0, 0, 0, :, 0] = 1  # four voxels, of which two are found, and one beside them
    found[0, 0, 0, :2, 0], found[0, 0, 1, 0, 0] = 1, 1
    scores, counted = dice_scores(found, mask, classes=3)
    assert scores[0, 0] == pytest.approx(2 * 2 / (4 + 3))
    assert counted.tolist() == [[True, False]], "a class that is nowhere is not counted"


def test_a_class_that_is_only_true_or_only_found_scores_zero_and_counts() -> None:
    mask = torch.zeros(2, 1, 2, 2, 2, dtype=torch.uint8)
    found = mask.clone()
    mask[0, 0, 0, 0, 0], found[1, 0, 0, 0, 0] = 1, 1
    scores, counted = dice_scores(found, mask, classes=2)
    assert scores.tolist() == [[0.0], [0.0]] and counted.tolist() == [[True], [True]]


def test_the_prediction_is_the_likelier_class() -> None:
    logits = torch.tensor([-0.1, 0.1]).reshape(2, 1, 1, 1, 1)
    assert predicted(logits).flatten().tolist() == [0, 1]
    logits = torch.tensor([[0.0, 3.0, 1.0], [0.0, -1.0, -2.0]]).reshape(2, 3, 1, 1, 1)
    assert predicted(logits).flatten().tolist() == [1, 0]
