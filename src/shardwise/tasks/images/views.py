"""From an image to the square of pixels that the model sees."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from shardwise.tasks.images.pictures import Pictures

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
RATIOS = (3 / 4, 4 / 3)
"""Width over height of a random crop."""
_TRIES = 10
_STRIPE = 16
"""How many times longer than wide an image is that is called a stripe."""


@dataclass(frozen=True)
class Look:
    """What the model wants to see."""

    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop_pct: float
    min_crop_area: float
    flip: bool

    @property
    def shorter_side(self) -> int:
        """Of a validation image, before its centre is cut out."""
        return int(self.size / self.crop_pct)


class Views:
    """A data set of (pixels, label). Pixels are bytes, in height × width × colour: a quarter of what floats would take
    to move; they become numbers around zero on the device."""

    def __init__(self, pictures: Pictures, look: Look, *, training: bool) -> None:
        self.pictures, self.look, self.training = pictures, look, training

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.pictures.open(index)
        view = training_view(image, self.look) if self.training else validation_view(image, self.look)
        return torch.from_numpy(np.array(view)), int(self.pictures.labels[index])


def training_view(image: Image.Image, look: Look) -> Image.Image:
    """A random part, mirrored half of the time. The loader has seeded `random` by (seed, epoch, sample)."""
    box = _random_box(image.width, image.height, look.min_crop_area)
    view = image.resize((look.size, look.size), Image.Resampling.BILINEAR, box=box)
    if look.flip and random.random() < 0.5:
        return view.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return view


def validation_view(image: Image.Image, look: Look) -> Image.Image:
    """The centre, after the shorter side was brought to its length."""
    short, long = sorted(image.size)
    if long > _STRIPE * short:
        # A stripe that is enlarged would take gigabytes; what its ends hold is not seen anyway.
        kept = _STRIPE * short
        left, top = max(0, image.width - kept) // 2, max(0, image.height - kept) // 2
        image = image.crop((left, top, left + min(image.width, kept), top + min(image.height, kept)))
        long = kept
    sides = look.shorter_side, int(look.shorter_side * long / short)
    width, height = sides if image.width <= image.height else sides[::-1]
    resized = image.resize((width, height), Image.Resampling.BILINEAR)
    left, top = (width - look.size) // 2, (height - look.size) // 2
    return resized.crop((left, top, left + look.size, top + look.size))


def _random_box(width: int, height: int, min_area: float) -> tuple[float, float, float, float]:
    for _ in range(_TRIES):
        area = random.uniform(min_area, 1) * width * height
        ratio = math.exp(random.uniform(math.log(RATIOS[0]), math.log(RATIOS[1])))
        across, down = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if across <= width and down <= height:
            left, top = random.uniform(0, width - across), random.uniform(0, height - down)
            return left, top, left + across, top + down
    side = min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side
