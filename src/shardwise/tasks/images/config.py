"""The blocks of `task: images`. Read without torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from shardwise.config.schema import Block, PathText, hub_name
from shardwise.tasks.hub_data import HubData
from shardwise.tasks.images.names import one_form

ColourValue = Annotated[int, Field(ge=0, le=255)]


class ImagesData(HubData):
    source: Literal["synthetic", "folder", "hub"] = Field(
        "synthetic",
        description="synthetic: coloured shapes made from the seed; folder: image files in a folder per class; "
        "hub: a Hugging Face data set.",
    )
    root: PathText | None = Field(
        None,
        description="folder: holds train/<class>/ and, if there is one, valid/<class>/ (or val/, validation/) with the images.",
    )
    image_column: str = Field("image", min_length=1, description="hub: the column that holds the image.")
    label_column: str = Field("label", min_length=1, description="hub: the column that holds the class.")
    classes: list[str] = Field(
        [],
        description="folder and hub: names of the classes, in the order of their numbers. Default: those of the data; "
        "with them, a run can be exported where its data is not at hand.",
    )
    valid_fraction: float = Field(
        0.1,
        gt=0,
        lt=1,
        description="Share of every class held out, chosen by the seed, if there is no validation data.",
    )
    num_images: int = Field(2000, ge=2, description="synthetic: how many images, validation included.")
    num_classes: int = Field(10, ge=2, le=60, description="synthetic: how many classes: five shapes in several hues.")
    image_size: int | None = Field(
        None,
        ge=8,
        description="Width and height that the model sees. Default: the named model's, else 224; 32 for synthetic.",
    )
    crop_pct: float = Field(
        0.875, gt=0, le=1, description="Validation: the central share, of the shorter side, that the model sees."
    )
    min_crop_area: float = Field(
        0.08,
        gt=0,
        le=1,
        description="Training: smallest share of the area that a random crop keeps; 1: no random crop.",
    )
    flip: bool = Field(True, description="Training: mirror every other image, left to right.")
    background: list[ColourValue] = Field(
        [255, 255, 255],
        min_length=3,
        max_length=3,
        description="Red, green and blue, 0 to 255, that are seen where an image is transparent.",
    )
    mean: list[float] | None = Field(
        None,
        min_length=3,
        max_length=3,
        description="Of red, green and blue in 0 to 1, subtracted. Default: the named model's, else ImageNet's.",
    )
    std: list[float] | None = Field(
        None, min_length=3, max_length=3, description="Of red, green and blue, divided by. Default: as for mean."
    )

    @model_validator(mode="after")
    def _source_is_complete(self) -> ImagesData:
        if self.source == "folder" and self.root is None:
            raise ValueError("source: folder needs root, a folder with train/<class>/ in it")
        if self.source != "folder" and self.root is not None:
            raise ValueError(f"root is read with source: folder, but source is {self.source}")
        if self.source == "synthetic" and self.classes:
            raise ValueError("classes names those of source: folder or hub; synthetic takes num_classes")
        return self

    @model_validator(mode="after")
    def _numbers_make_sense(self) -> ImagesData:
        if len({one_form(name) for name in self.classes}) != len(self.classes):
            raise ValueError("classes has a name twice")
        if len(self.classes) == 1:
            raise ValueError("classes has one name: with one class there is nothing to tell apart")
        if self.std is not None and min(self.std) <= 0:
            raise ValueError(f"std must be above zero, not {self.std}")
        return self


class ImagesModel(Block):
    name: PathText | None = Field(
        None,
        description="A Hugging Face image classification model: hub name or folder. Default: from scratch.",
        json_schema_extra=hub_name("model"),
    )
    architecture: str = Field(
        "resnet18",
        description="From scratch: resnet18, 34, 50, 101 or 152, vit-ti16, vit-s16, vit-b16 or vit-l16; or a Hugging Face "
        "model type (resnet, vit, convnext, swin, …) with its default sizes.",
    )
    depths: list[int] | None = Field(None, min_length=1, description="From scratch: blocks of each stage (resnet, …).")
    widths: list[int] | None = Field(None, min_length=1, description="From scratch: width of each stage (resnet, …).")
    hidden_dim: int | None = Field(None, ge=1, description="From scratch: width (vit, …).")
    num_layers: int | None = Field(None, ge=1, description="From scratch: blocks (vit, …).")
    num_heads: int | None = Field(None, ge=1, description="From scratch: attention heads; must divide hidden_dim.")
    intermediate_dim: int | None = Field(
        None, ge=1, description="From scratch: width of the MLP; default 4 × hidden_dim where that is given."
    )
    patch_size: int | None = Field(None, ge=1, description="From scratch: side of a patch; must divide image_size.")
    dropout: float = Field(0.0, ge=0, lt=1, description="From scratch, where the architecture has it.")
    label_smoothing: float = Field(
        0.0, ge=0, lt=1, description="Share of the target spread evenly over all classes, in training only."
    )
    channels_last: bool = Field(
        True,
        description="Weights and batches in the memory order that convolutions are fastest in; under fsdp batches only.",
    )
    extra: dict[str, Any] = Field(
        {}, description="From scratch: further fields of the Hugging Face config, as they are."
    )

    @model_validator(mode="after")
    def _sizes_fit(self) -> ImagesModel:
        if self.depths and self.widths and len(self.depths) != len(self.widths):
            raise ValueError(
                f"depths has {len(self.depths)} stages and widths has {len(self.widths)}: give one per stage"
            )
        if self.hidden_dim and self.num_heads and self.hidden_dim % self.num_heads:
            raise ValueError(f"num_heads: {self.num_heads} must divide hidden_dim: {self.hidden_dim}")
        return self


BLOCKS: dict[str, type[Block]] = {"data": ImagesData, "model": ImagesModel}
