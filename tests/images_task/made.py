"""Small images and models, made on the spot."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from shardwise.tasks.images.task import ImagesTask
from tests.tasks import config_of

RESNET = """
task: images
name: images
data: {num_images: 60, num_classes: 6, image_size: 16, valid_fraction: 0.2}
model: {architecture: resnet, depths: [1, 1], widths: [16, 32], extra: {embedding_size: 8}}
training: {batch_size: 8, gradient_clip: 1.0, optimizer: {lr: 0.01}}
"""
VIT = """
task: images
name: images
data: {num_images: 59, num_classes: 6, image_size: 16, valid_fraction: 0.2}
model: {architecture: vit, hidden_dim: 16, num_layers: 2, num_heads: 2, patch_size: 4}
training: {batch_size: 12, gradient_clip: 1.0, max_epochs: 2, optimizer: {lr: 0.01}}
"""


def task_of(text: str = RESNET, *overrides: str) -> ImagesTask:
    return ImagesTask(config_of(text, list(overrides)))


def write_images(
    folder: Path, numbers: Mapping[str, int], ending: str = ".png", size: tuple[int, int] = (24, 20)
) -> Path:
    """`numbers` of images of noise per class, in a folder for each: others in train/ than in valid/."""
    draw = np.random.default_rng([*folder.name.encode()])
    for name, number in numbers.items():
        (folder / name).mkdir(parents=True)
        for index in range(number):
            pixels = draw.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{index}{ending}")
    return folder


def write_model(folder: Path, architecture: str = "resnet", *, num_classes: int = 3) -> Path:
    """A model with its processor, saved as Hugging Face saves them."""
    from transformers import AutoConfig, AutoModelForImageClassification

    sizes: dict[str, dict[str, Any]] = {
        "resnet": {"depths": [1, 1], "hidden_sizes": [16, 32], "embedding_size": 8},
        "vit": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
                "image_size": 16, "patch_size": 4},
    }  # fmt: skip
    config = AutoConfig.for_model(architecture, num_labels=num_classes, **sizes[architecture])
    AutoModelForImageClassification.from_config(config).save_pretrained(folder)
    processor = {
        "image_processor_type": "BitImageProcessor",
        "size": {"shortest_edge": 20},
        "crop_size": {"height": 16, "width": 16},
        "image_mean": [0.5, 0.4, 0.3],
        "image_std": [0.2, 0.3, 0.4],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder
