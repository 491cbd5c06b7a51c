"""A folder of images: root/train/<class>/ and, if there is one, root/valid/<class>/."""

from __future__ import annotations

import difflib
import logging
import os
from pathlib import Path

import numpy as np
from PIL import Image

from shardwise.errors import DataError
from shardwise.tasks.images.config import ImagesData
from shardwise.tasks.images.pictures import Pictures, decode

log = logging.getLogger(__name__)

ENDINGS = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"}


class Files(Pictures):
    def __init__(self, files: list[Path], labels: list[int], place: str) -> None:
        self.files, self.labels, self.place = files, np.array(labels), place

    def open(self, index: int, *, reduced: bool = False) -> Image.Image:
        return decode(self.files[index], self.name(index), reduced=reduced)

    def name(self, index: int) -> str:
        return str(self.files[index])

    def key(self, index: int) -> str:
        facts = self.files[index].stat()
        return f"{self.files[index].absolute()}/{facts.st_size}/{facts.st_mtime_ns}"


def read_folder(options: ImagesData) -> tuple[list[str], Files, Files | None]:
    """The names of the classes, the images to train on, and those to validate on if there are any."""
    root = Path(str(options.root))
    if not root.is_dir():
        raise DataError(f"data.root: there is no folder {root}. It holds train/<class>/ with the images of each class")
    train = root / "train"
    if not train.is_dir():
        raise DataError(
            f"data.root: {root} has no folder train (it has {_listed([path.name for path in root.iterdir()])}): "
            "put the class folders into train/"
        )
    found = _class_folders(train)
    classes = options.classes or found
    if len(classes) < 2:
        raise DataError(f"{train} holds {len(classes)} class folders: to tell classes apart, it needs two or more")
    held_out = next((root / name for name in ("valid", "val") if (root / name).is_dir()), None)
    return classes, _files(train, classes), _files(held_out, classes) if held_out else None


def _class_folders(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _files(folder: Path, classes: list[str]) -> Files:
    files: list[Path] = []
    labels: list[int] = []
    others: list[Path] = []
    for name in _class_folders(folder):
        if name not in classes:
            near = difflib.get_close_matches(name, classes, 1)
            raise DataError(
                f"{folder / name}: there is no class {name!r} {'in data.classes or ' if folder.name == 'train' else ''}"
                f"in training{f'; nearest: {near[0]!r}' if near else ''}. Rename or remove the folder"
            )
        images, skipped_batches = _images_in(folder / name)
        if not images:
            raise DataError(
                f"{folder / name} has no images (files ending in {' '.join(sorted(ENDINGS))}): add some, or remove the folder"
            )
        files += images
        labels += [classes.index(name)] * len(images)
        others += skipped_batches
    if not files:
        raise DataError(f"{folder} holds no class folders: it needs one per class, with the images in them")
    if others:
        log.info(f"{folder}: {len(others)} files do not end as images do and are left out, {others[0].name} first")
    return Files(files, labels, str(folder.absolute()))


def _images_in(folder: Path) -> tuple[list[Path], list[Path]]:
    """Images and other files, sorted, those in folders below included. Hidden files are neither."""
    images: list[Path] = []
    others: list[Path] = []
    for parent, folders, names in os.walk(folder, followlinks=True):
        folders.sort()
        for name in sorted(names):
            if not name.startswith("."):
                (images if os.path.splitext(name)[1].lower() in ENDINGS else others).append(Path(parent, name))  # noqa: PTH122
    return images, others


def _listed(names: list[str]) -> str:
    shown = sorted(names)[:5]
    return ", ".join(shown) + (", …" if len(names) > len(shown) else "") if names else "nothing"
