"""Do cells of one type lie together? Nearest neighbours in the embedding, and a picture of it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F


def knn_agreement(embedding: Tensor, labels: Tensor, neighbours: int = 10) -> float:
    """The share of a cell's nearest neighbours (by angle) that have its label, averaged over cells."""
    count = len(embedding)
    k = min(neighbours, count - 1)
    if k < 1:
        return float("nan")
    directions = F.normalize(embedding.float() - embedding.float().mean(dim=0), dim=1)
    agreeing = 0
    for begin in range(0, count, 1024):
        near = directions[begin : begin + 1024] @ directions.T
        near[torch.arange(len(near)), torch.arange(begin, begin + len(near))] = -torch.inf  # not itself
        agreeing += int((labels[near.topk(k).indices] == labels[begin : begin + 1024, None]).sum())
    return agreeing / (count * k)


def draw_cells(embedding: Tensor, labels: Tensor, names: list[str], title: str, file: Path) -> None:
    """The first two principal components, coloured by label."""
    from matplotlib.figure import Figure

    centred = embedding.float() - embedding.float().mean(dim=0)
    _, strengths, axes = torch.linalg.svd(centred, full_matrices=False)
    points = (centred @ axes[:2].T).numpy()
    shares = (strengths[:2] ** 2 / (strengths**2).sum()).tolist()
    figure = Figure(figsize=(7, 5.5), layout="constrained")
    plot = figure.subplots()
    for label in labels.unique().tolist():
        of_label = (labels == label).numpy()
        plot.scatter(
            points[of_label, 0], points[of_label, 1], s=9, alpha=0.7, linewidths=0, color=_colour(label),
            label=names[label] if 0 <= label < len(names) else "none",
        )  # fmt: skip
    plot.set(title=title, xlabel=f"component 1 ({shares[0]:.0%})", ylabel=f"component 2 ({shares[1]:.0%})")
    if len(labels.unique()) <= 30:
        plot.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, markerscale=2, fontsize="small")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)


def _colour(label: int) -> tuple[float, float, float]:
    """Neighbouring numbers get colours far apart; the number alone decides, so that pictures can be compared."""
    import colorsys

    return colorsys.hsv_to_rgb(label * 0.618034 % 1, 0.65 + 0.3 * (label % 2), 0.55 + 0.15 * (label % 3))
