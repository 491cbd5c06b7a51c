"""Coloured shapes on a noisy ground. Image i follows from (seed, i) alone, and nothing is stored."""

from __future__ import annotations

import colorsys
import math

import numpy as np
from PIL import Image

from shardwise.config.seeds import Purpose
from shardwise.tasks.images.pictures import Pictures

# A class must survive what training does to an image: mirrored, cropped or enlarged, each of these is still itself.
SHAPES = ("disc", "square", "triangle", "ring", "cross")


class Shapes(Pictures):
    def __init__(self, seed: int, number: int, num_classes: int, size: int) -> None:
        self.seed, self.size = seed, size
        self.hues = math.ceil(num_classes / len(SHAPES))
        self.labels = np.arange(number) % num_classes
        self.classes = [self._name(label) for label in range(num_classes)]

    def open(self, index: int, *, reduced: bool = False) -> Image.Image:
        draw = np.random.default_rng([self.seed, Purpose.DATA, index])
        shape, hue = self._shape_and_hue(int(self.labels[index]))
        radius = draw.uniform(0.35, 0.6)
        across, down = draw.uniform(radius - 1, 1 - radius, 2)
        # Coordinates in which the shape has its centre at 0 and reaches to 1.
        line = (np.arange(self.size) + 0.5) * 2 / self.size - 1
        inside = _mask(shape, (line[None, :] - across) / radius, (line[:, None] - down) / radius)
        colour = colorsys.hsv_to_rgb(
            hue + draw.uniform(-0.1, 0.1) / self.hues, draw.uniform(0.6, 1), draw.uniform(0.7, 1)
        )
        canvas = np.full((self.size, self.size, 3), draw.uniform(0.1, 0.6))
        canvas[inside] = colour
        canvas += draw.normal(0, 0.1, canvas.shape)
        return Image.fromarray((canvas.clip(0, 1) * 255).astype(np.uint8))

    def _shape_and_hue(self, label: int) -> tuple[str, float]:
        return SHAPES[label % len(SHAPES)], label // len(SHAPES) / self.hues

    def _name(self, label: int) -> str:
        shape, hue = self._shape_and_hue(label)
        return f"{shape} at hue {round(360 * hue)}"


def _mask(shape: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    distance = np.hypot(x, y)
    if shape == "disc":
        return distance < 0.9
    if shape == "ring":
        return (distance < 1) & (distance > 0.6)
    if shape == "square":
        return np.maximum(abs(x), abs(y)) < 0.8
    if shape == "triangle":
        return (y < 0.8) & (abs(x) < (y + 0.9) / 1.8)
    return (np.minimum(abs(x), abs(y)) < 0.25) & (np.maximum(abs(x), abs(y)) < 0.95)
