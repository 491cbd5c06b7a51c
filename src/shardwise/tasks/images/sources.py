"""Where images come from: made from the seed, a folder per class, or a Hugging Face data set."""

from __future__ import annotations

from shardwise.tasks.images.config import ImagesData
from shardwise.tasks.images.folder import read_folder
from shardwise.tasks.images.hub import read_hub
from shardwise.tasks.images.pictures import ImageData, Pictures, Subset, held_out
from shardwise.tasks.images.synthetic import Shapes


def load_images(options: ImagesData, seed: int, size: int) -> ImageData:
    """Training and validation images. No image is in both."""
    classes: list[str]
    train: Pictures
    valid: Pictures | None
    if options.source == "synthetic":
        shapes = Shapes(seed, options.num_images, options.num_classes, size)
        classes, train, valid = shapes.classes, shapes, None
    elif options.source == "folder":
        classes, train, valid = read_folder(options)
    else:
        classes, train, valid = read_hub(options)
    if valid is not None:
        return ImageData(classes, train, valid)
    kept, out = held_out(train.labels, options.valid_fraction, seed)
    return ImageData(classes, Subset(train, kept), Subset(train, out), held_out=True)
