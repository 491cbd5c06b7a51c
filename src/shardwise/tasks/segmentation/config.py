"""The blocks of `task: segmentation`. Read without torch."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from shardwise.config.schema import Block, DataBlock, PathText

Voxels = Annotated[int, Field(ge=1)]
Millimetres = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
ClassName = Annotated[str, Field(min_length=1)]


class SegmentationData(DataBlock):
    source: Literal["synthetic", "folder", "msd"] = Field(
        "synthetic",
        description="synthetic: volumes with lesions made from the seed; folder: train/<subject>/img.nii.gz and "
        "label.nii.gz; msd: a task of the Medical Segmentation Decathlon, with its dataset.json.",
    )
    root: PathText | None = Field(None, description="folder and msd: the folder that holds train/, or dataset.json.")
    classes: Annotated[int, Field(ge=2, le=255)] | list[ClassName] | None = Field(
        None,
        description="How many classes, background included, or their names, background first. "
        "Default: those of dataset.json with msd, else 2.",
    )
    in_channels: int | None = Field(
        None,
        ge=1,
        description="Channels of an image. Default: those of dataset.json with msd, else of the first image.",
    )
    valid_fraction: float = Field(
        0.2,
        gt=0,
        lt=1,
        description="Share of subjects held out, chosen by the seed; not used if there is a folder valid/, validation/ or val/, "
        "or a list of that name in dataset.json.",
    )
    normalize: Literal["window", "zscore", "none"] | None = Field(
        None,
        description="window: intensity_window becomes 0 to 1, what lies outside is cut; zscore: mean 0 and deviation 1 per "
        "channel. Default: window where intensity_window is given, else zscore.",
    )
    intensity_window: list[float] | None = Field(
        None, min_length=2, max_length=2, description="Lowest and highest intensity that matter; for CT in HU."
    )
    spacing: list[Millimetres] | None = Field(
        None, min_length=3, max_length=3, description="Resample to voxels of this size in mm; default: as in the files."
    )
    spatial_mode: Literal["resize", "patches"] = Field(
        "resize",
        description="resize: the whole volume, scaled to `size`; patches: random crops of `size` to train on, and a "
        "sliding window of `size` over the whole volume to validate.",
    )
    size: list[Voxels] = Field(
        [64, 64, 64], min_length=3, max_length=3, description="What the network sees, in voxels."
    )
    patches_per_volume: int = Field(
        1, ge=1, description="patches: crops per volume and epoch, half of them centred on foreground."
    )
    flips: Share | Annotated[list[Share], Field(min_length=3, max_length=3)] | None = Field(
        None,
        description="Probability of a flip: one number for every axis, or three, for left-right, back-front and down-up. "
        "Default: 0.5, but 0 for left-right where class names tell left from right.",
    )
    intensity_shift: float = Field(
        0.1, ge=0, description="Largest shift of the normalised intensities; half of the training samples get one."
    )
    cache: bool = Field(True, description="Keep what does not change from epoch to epoch on disk, in $SHARDWISE_CACHE.")
    sw_overlap: float = Field(0.25, ge=0, lt=1, description="patches: overlap of the windows in validation.")
    num_subjects: int = Field(24, ge=2, description="synthetic: how many volumes, validation included.")
    volume_size: list[Annotated[int, Field(ge=8)]] = Field(
        [48, 48, 40], min_length=3, max_length=3, description="synthetic: voxels of the largest volume."
    )

    @model_validator(mode="after")
    def _consistent(self) -> SegmentationData:
        if self.source != "synthetic" and self.root is None:
            holds = "train/<subject>/img.nii.gz" if self.source == "folder" else "dataset.json"
            raise ValueError(f"source: {self.source} needs root, the folder that holds {holds}")
        if self.source == "synthetic" and self.root is not None:
            raise ValueError("root is read with source: folder or msd, but source is synthetic")
        if self.normalize == "window" and self.intensity_window is None:
            raise ValueError("normalize: window needs intensity_window, for example [-1000, 400]")
        if self.normalize in ("zscore", "none") and self.intensity_window is not None:
            raise ValueError(f"intensity_window contradicts normalize: {self.normalize}: leave one of them out")
        if self.intensity_window is not None and self.intensity_window[0] >= self.intensity_window[1]:
            raise ValueError(f"intensity_window is [low, high], but {self.intensity_window[0]} is not the lower one")
        if self.spatial_mode == "resize" and self.patches_per_volume > 1:
            raise ValueError("patches_per_volume is used with spatial_mode: patches, but spatial_mode is resize")
        if isinstance(self.classes, list):
            check_class_names(self.classes)
        return self


def check_class_names(names: list[str]) -> None:
    """Raises ValueError where they cannot be told apart."""
    if not 2 <= len(names) <= 255:
        raise ValueError(f"classes: {len(names)} name(s); give 2 to 255, background first")
    metrics = [metric_name(name) for name in names]
    if twice := sorted({name for name in metrics if metrics.count(name) > 1}):
        raise ValueError(f"classes: {', '.join(twice)} would name two metrics; give every class a name of its own")


def metric_name(class_name: str) -> str:
    """`left ventricle` is measured as dice_left_ventricle."""
    return "dice_" + re.sub(r"\W+", "_", class_name.strip())


class SegmentationModel(Block):
    name: str = Field("SegResNet", min_length=1, description="A network of monai.networks.nets, such as SwinUNETR.")
    args: dict[str, Any] = Field(
        {},
        description="Its arguments, as MONAI calls them. in_channels, out_channels, spatial_dims and img_size follow from "
        "the data, where the network takes them.",
    )
    loss: Literal["dice", "dice_ce"] = Field("dice_ce", description="Dice, or Dice plus cross entropy.")


BLOCKS: dict[str, type[Block]] = {"data": SegmentationData, "model": SegmentationModel}
