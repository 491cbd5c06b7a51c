"""MONAI's dictionary transforms: those that always give the same, which are cached, and those that draw."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardwise.tasks.segmentation.config import SegmentationData
from shardwise.tasks.segmentation.nifti import Grid

if TYPE_CHECKING:
    from monai.transforms import Compose

KEYS = ("image", "mask")
AXES = (("L", "R"), ("P", "A"), ("I", "S"))
"""MONAI 1.6 warns about its own default for these."""
ORIENTATION = "RAS"
"""How every volume lies once it is oriented: along its first axis from left to right, then from back to front, then up.
Three values for three axes (`data.spacing`, `data.flips`) are in this order, and so is `Grid.upright`."""


def fixed_settings(options: SegmentationData) -> dict[str, Any]:
    """All that `fixed_transforms` asks for: where they are the same, so is what it gives."""
    used = {"intensity_window", "normalize", "spacing", "spatial_mode"}
    return options.model_dump(include=used | ({"size"} if options.spatial_mode == "resize" else set()))


def fixed_transforms(options: SegmentationData) -> Compose:
    """What files hold becomes what is trained on: oriented alike, resampled, normalised, and of one size in resize mode."""
    from monai import transforms as monai

    # A mask is made of numbers that are names: between class 1 and class 3 there is no class 2.
    steps: list[Any] = [monai.Orientationd(KEYS, axcodes=ORIENTATION, labels=AXES)]
    if options.spacing is not None:
        steps.append(monai.Spacingd(KEYS, pixdim=options.spacing, mode=("bilinear", "nearest")))
    if options.intensity_window is not None:
        low, high = options.intensity_window
        steps.append(monai.ScaleIntensityRanged("image", a_min=low, a_max=high, b_min=0.0, b_max=1.0, clip=True))
    elif options.normalize != "none":
        steps.append(monai.NormalizeIntensityd("image", channel_wise=True))
    if options.spatial_mode == "resize":
        # nearest-exact: plain nearest takes the voxel before, and the mask would lie half a voxel beside its image.
        steps.append(monai.Resized(KEYS, spatial_size=options.size, mode=("trilinear", "nearest-exact")))
    return monai.Compose(steps)


def random_transforms(options: SegmentationData, flips: Sequence[float]) -> Compose:
    """What differs between epochs; `flips` is the probability for each axis. Its random state must be set before each use."""
    from monai import transforms as monai

    steps: list[Any] = []
    if options.spatial_mode == "patches":
        # Zeros, as the sliding window of the validation pads with.
        steps.append(monai.SpatialPadd(KEYS, spatial_size=options.size))
        steps.append(
            monai.RandCropByPosNegLabeld(
                KEYS, label_key="mask", spatial_size=options.size, num_samples=options.patches_per_volume
            )
        )
    steps += [monai.RandFlipd(KEYS, prob=prob, spatial_axis=axis) for axis, prob in enumerate(flips) if prob]
    if options.intensity_shift:
        steps.append(monai.RandShiftIntensityd("image", offsets=options.intensity_shift, prob=0.5))
    return monai.Compose(steps)


def shape_after(grid: Grid, options: SegmentationData) -> tuple[int, int, int]:
    """The shape that the fixed transforms will give, without reading a voxel: MONAI's lazy mode only adds it up."""
    import torch
    from monai import transforms as monai
    from monai.data import MetaTensor

    if options.spatial_mode == "resize":
        x, y, z = options.size
        return x, y, z
    affine = torch.tensor(grid.affine, dtype=torch.float64)
    volume = MetaTensor(torch.zeros(1).expand(1, *grid.shape), affine=affine)
    volume = monai.Orientation(axcodes=ORIENTATION, labels=AXES, lazy=True)(volume)
    if options.spacing is not None:
        volume = monai.Spacing(pixdim=options.spacing, lazy=True)(volume)
    x, y, z = (int(side) for side in volume.peek_pending_shape())
    return x, y, z
