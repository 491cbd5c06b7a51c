"""The image classification task: cross entropy, accuracy, and top-5 accuracy where there are more than five classes."""

from __future__ import annotations

import json
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError, MissingExtra

# Looked for and not imported: Transformers takes seconds, and the process that only starts the ranks has no use for it.
if _missing := [name for name in ("PIL", "transformers") if find_spec(name) is None]:
    raise MissingExtra.of("pillow" if _missing[0] == "PIL" else _missing[0], "images", "task: images")

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from shardwise.compat.modules import BatchNorm
from shardwise.data import Contents, SampleContents
from shardwise.data.overlap import ANY, MOST, NEVER
from shardwise.parallel import strategy_for
from shardwise.tasks.base import Loss, Task
from shardwise.tasks.images.check import Checked, check_images, tell_traits
from shardwise.tasks.images.classes import check_classes, tell_conflicts
from shardwise.tasks.images.config import ImagesData, ImagesModel
from shardwise.tasks.images.model import build_classifier, pretrained_look
from shardwise.tasks.images.pictures import ImageData
from shardwise.tasks.images.sources import load_images
from shardwise.tasks.images.views import IMAGENET_MEAN, IMAGENET_STD, Look, Views

DEFAULT_SIZE = 224
SYNTHETIC_SIZE = 32


class ImagesTask(Task):
    Data, Model = ImagesData, ImagesModel
    unit = "images"
    one_size = True
    _checked: list[Checked | None] | None = None
    """Of the training and the validation images, where this process has checked them."""

    @property
    def _data_options(self) -> ImagesData:
        return self.config.data

    @property
    def _model_options(self) -> ImagesModel:
        return self.config.model

    @cached_property
    def _images(self) -> ImageData:
        return load_images(self._data_options, self.config.seed, self.look.size)

    @cached_property
    def classes(self) -> list[str]:
        return list(self.trained_labels) or self._data_options.classes or self._images.classes

    @cached_property
    def look(self) -> Look:
        options = self._data_options
        pretrained = pretrained_look(self._model_options)
        default_size = SYNTHETIC_SIZE if options.source == "synthetic" else DEFAULT_SIZE
        return Look(
            size=options.image_size or pretrained.get("image_size", default_size),
            mean=tuple(options.mean or pretrained.get("image_mean", IMAGENET_MEAN)),
            std=tuple(options.std or pretrained.get("image_std", IMAGENET_STD)),
            crop_pct=options.crop_pct,
            min_crop_area=options.min_crop_area,
            flip=options.flip,
        )

    def prepare_data(self) -> None:
        images, options = self._images, self._data_options
        parts = [images.train, images.valid]
        check_classes(images, self.classes)
        self._checked = check_images(*parts)
        chosen = "background" in options.model_fields_set
        tell_traits(parts, self._checked, str(options.background), chosen=chosen)
        tell_conflicts(images, self.classes, self._checked)

    def train_data(self) -> Views:
        return Views(self._images.train, self.look, training=True)

    def valid_data(self) -> Views:
        return Views(self._images.valid, self.look, training=False)

    def sample_contents(self, train: Any, valid: Any) -> SampleContents | None:
        """By the bytes of the files, which were read when they were checked."""
        images = self._images
        checked = self._checked if self._checked is not None else check_images(images.train, images.valid)
        if (trained := checked[0]) is None or (validated := checked[1]) is None:
            return None
        return SampleContents(
            Contents(trained.contents, images.train.name),
            Contents(validated.contents, images.valid.name),
            unit="images",
            # Of a published data set, both parts are given, and some have a few copies in both.
            error_above=NEVER if images.held_out else ANY if self._data_options.source == "folder" else MOST,
            held_out=images.held_out,
        )

    def labels(self) -> list[str]:
        return self.classes

    def build_model(self) -> nn.Module:
        model = build_classifier(self._model_options, self.classes, self.look.size)
        if self.config.training.precision == "bf16-true" and any(isinstance(m, BatchNorm) for m in model.modules()):
            raise ConfigError(
                "training.precision: bf16-true does not go with batch norm, whose statistics stay in fp32 (torch 2.13 "
                "fails on the mixture): use bf16-mixed"
            )
        # fully_shard refuses weights in any other than the plain order (torch 2.13).
        if self._model_options.channels_last and strategy_for(self.config, 1).keeps_memory_format:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model

    def collate(self, samples: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
        # Colour is innermost in a decoded image: seen as batch × colour × height × width, that is channels-last.
        pixels = torch.stack([pixels for pixels, _ in samples]).permute(0, 3, 1, 2)
        if not self._model_options.channels_last:
            pixels = pixels.contiguous()
        return {"pixels": pixels, "labels": torch.tensor([label for _, label in samples])}

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        return _cross_entropy(self._logits(model, batch), batch["labels"], self._model_options.label_smoothing)

    def evaluate(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Loss]:
        logits, labels = self._logits(model, batch), batch["labels"]
        metrics = {"loss": _cross_entropy(logits, labels), "accuracy": _hits(logits, labels, 1)}
        return metrics | ({"top5_accuracy": _hits(logits, labels, 5)} if len(self.classes) > 5 else {})

    def metric_names(self) -> tuple[str, ...]:
        return "loss", "accuracy", *(("top5_accuracy",) if len(self.classes) > 5 else ())

    def flops_per_count(self, model: nn.Module) -> float | None:
        """3 × the forward operations of one image, as torch.utils.flop_counter counts them (a multiply-add is two)."""
        with torch.device("meta"):
            shape = build_classifier(self._model_options, self.classes, self.look.size).eval()
            image = torch.empty(1, 3, self.look.size, self.look.size)
        try:
            with FlopCounterMode(display=False) as counter, torch.no_grad():
                shape(pixel_values=image)
        except (RuntimeError, NotImplementedError):  # a model that looks at values, which meta tensors do not have
            return None
        return 3.0 * counter.get_total_flops()

    def export(self, model: Any, folder: Path) -> None:
        """A folder that AutoModelForImageClassification.from_pretrained and AutoImageProcessor.from_pretrained load."""
        model.to(memory_format=torch.contiguous_format)  # safetensors knows no other order
        model.save_pretrained(folder)
        # Written by hand: the class that would write it has another name in every second release of Transformers, and may
        # want torchvision. BiT's processor does what validation_view does: shorter side, centre, mean and deviation.
        processor = {
            "image_processor_type": "BitImageProcessor",
            "do_convert_rgb": True,
            "do_resize": True,
            "size": {"shortest_edge": self.look.shorter_side},
            "resample": int(Image.Resampling.BILINEAR),
            "do_center_crop": True,
            "crop_size": {"height": self.look.size, "width": self.look.size},
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": self.look.mean,
            "image_std": self.look.std,
        }
        (folder / "preprocessor_config.json").write_text(json.dumps(processor, indent=2) + "\n")

    def _logits(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        mean, std = self._scale(batch["pixels"].device)
        return model(pixel_values=(batch["pixels"].float() - mean) / std).logits

    def _scale(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Mean and deviation for bytes, made once per device: a copy from the host in every step would wait for it."""
        if device not in self._scales:
            mean, std = (255 * torch.tensor(values).view(3, 1, 1) for values in (self.look.mean, self.look.std))
            self._scales[device] = (mean.to(device), std.to(device))
        return self._scales[device]

    @cached_property
    def _scales(self) -> dict[torch.device, tuple[Tensor, Tensor]]:
        return {}


def _cross_entropy(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Loss:
    return Loss(F.cross_entropy(logits.float(), labels, reduction="sum", label_smoothing=smoothing), len(labels))


def _hits(logits: Tensor, labels: Tensor, among: int) -> Loss:
    """How often the right class is among the first choices."""
    choices = logits.topk(among, dim=-1).indices
    return Loss((choices == labels[:, None]).any(dim=-1).sum(), len(labels))
