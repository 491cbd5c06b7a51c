"""Pictures of a few validation subjects: the slice that shows most, with the truth and the prediction over it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from shardwise.data.cache import made_once
from shardwise.tasks.base import Rows

SUBJECTS = 4
"""How many are drawn: the first of the validation data."""


def overlay_row(
    key: Tensor, image: Tensor, mask: Tensor, prediction: Tensor, dice: Tensor, spacing: Tensor, frame: Sequence[int]
) -> Rows:
    """What is needed to draw a subject: one axial slice, padded to a frame that is the same for all.

    `image` [channels, x, y, z], `mask` and `prediction` [1, x, y, z].
    """
    depth = telling_slice(mask[0])
    sides = image.shape[1:3]
    margin = (0, frame[1] - sides[1], 0, frame[0] - sides[0])
    columns = {
        "image": F.pad(image[0, :, :, depth].float(), margin),
        "truth": F.pad(mask[0, :, :, depth], margin),
        "prediction": F.pad(prediction[0, :, :, depth], margin),
        "dice": dice,
        "place": torch.tensor([*sides, depth, mask.shape[-1]]),
        "spacing": spacing,
    }
    return Rows(key.reshape(1), {name: column.unsqueeze(0) for name, column in columns.items()})


def telling_slice(mask: Tensor) -> int:
    """Of the slices [:, :, z], the one with the most classes, and among those the one with the most foreground."""
    classes = int(mask.max()) + 1
    # Slice by slice: counting in the whole volume at once would need eight bytes per voxel.
    counts = torch.stack([mask[:, :, z].flatten().bincount(minlength=classes) for z in range(mask.shape[-1])])[:, 1:]
    areas = counts.sum(dim=1)
    if not int(areas.sum()):
        return mask.shape[-1] // 2
    voxels = mask.shape[0] * mask.shape[1]
    return int(((counts > 0).sum(dim=1) * (voxels + 1) + areas).argmax())


def draw_overlays(rows: Rows, names: Sequence[str], classes: Sequence[str], file: Path, step: int) -> None:
    """One line per subject: the image, the truth, the prediction. Seen from the feet, as radiologists do: the
    patient's right is on the left, the front is up."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    number = len(rows.keys)
    # Not through pyplot, which keeps every figure alive.
    figure = Figure(figsize=(9.0, 3.1 * number + 0.8), layout=ConstrainedLayoutEngine(h_pad=0.08))
    FigureCanvasAgg(figure)
    axes = figure.subplots(number, 3, squeeze=False)
    for line, key in enumerate(rows.keys.tolist()):
        row = {name: column[line] for name, column in rows.columns.items()}
        _draw_subject(axes[line], names[key], row, len(classes))
    axes[-1][0].set_xlabel("R ← → L", fontsize=8)
    figure.suptitle(f"step {step}")
    figure.legend(handles=_legend(classes), loc="outside lower center", ncols=min(6, len(classes) - 1), frameon=False)
    file.unlink(missing_ok=True)  # of the same step, before the run was interrupted
    made_once(file, lambda aside: figure.savefig(aside, dpi=110))


def _draw_subject(axes: Any, name: str, row: dict[str, Tensor], classes: int) -> None:
    x, y, depth, depths = row["place"].tolist()
    score = float(row["dice"])
    titles = (
        f"{name}, slice {depth + 1} of {depths}",
        "truth",
        f"prediction, Dice {score:.2f}" if score == score else "prediction, no foreground",
    )
    # Arrays are [right, front]; a picture is [down, right].
    shown = {key: row[key][:x, :y].flip((0, 1)).T.numpy() for key in ("image", "truth", "prediction")}
    aspect = float(row["spacing"][1] / row["spacing"][0])
    low, high = (float(bound) for bound in torch.quantile(row["image"][:x, :y].flatten(), torch.tensor([0.01, 0.99])))
    for axis, title, overlay in zip(axes, titles, (None, shown["truth"], shown["prediction"]), strict=True):
        axis.imshow(shown["image"], cmap="gray", vmin=low, vmax=max(high, low + 1e-6), aspect=aspect)
        if overlay is not None:
            axis.imshow(_coloured(overlay, classes), aspect=aspect, interpolation="nearest")
        axis.set_title(title, fontsize=10)
        axis.set_xticks([])
        axis.set_yticks([])


def _coloured(classes_of: Any, classes: int) -> Any:
    """Red, green, blue and opacity of each voxel; the background is clear."""
    colours = np.zeros((classes, 4))
    colours[1:] = [(*_colour(number), 0.5) for number in range(1, classes)]
    return colours[classes_of]


def _colour(number: int) -> tuple[float, float, float]:
    from matplotlib import colormaps

    red, green, blue = colormaps["tab10"]((number + 2) % 10)[:3]  # from red on: blue and orange are hard to see on grey
    return red, green, blue


def _legend(classes: Sequence[str]) -> list[Any]:
    from matplotlib.patches import Patch

    return [Patch(color=_colour(number), alpha=0.5, label=name) for number, name in enumerate(classes) if number]
