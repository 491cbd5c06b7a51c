"""A folder of images: root/train/<class>/ and, if there is one, root/valid/<class>/."""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from shardwise.data.file_kinds import is_left_by_a_system
from shardwise.errors import DataError
from shardwise.tasks.images.config import ImagesData
from shardwise.tasks.images.decode import WHITE, Background, Facts, decode, inspect
from shardwise.tasks.images.names import numbers_of, one_form
from shardwise.tasks.images.pictures import Pictures, file_key

log = logging.getLogger(__name__)

ENDINGS = {
    *(".png", ".apng", ".jpg", ".jpeg", ".jpe", ".jfif", ".webp", ".avif", ".bmp", ".gif", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pbm", ".pnm"),
}
NOT_READ = {
    *(".heic", ".heif", ".hif", ".jxl", ".jp2", ".j2k", ".tga", ".psd", ".svg", ".eps", ".pdf", ".ico", ".exr", ".hdr"),
    *(".dng", ".cr2", ".cr3", ".nef", ".arw", ".orf", ".rw2", ".raf", ".raw", ".dcm", ".npy", ".npz", ".nii", ".mat"),
}
"""Endings of files that hold images all the same: somebody may think that they are trained on."""
FORMATS = ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF")
"""Pillow's names of those that are looked for in files with other endings."""
LOOKED_AT = 100
"""Files of each other ending whose content is looked at; those without any ending are all looked at."""
VALIDATION = ("valid", "val", "validation")
MASK = re.compile(r"(.+)[ _-](?:mask|seg|segmentation|label|annotation|gt)(?:[ _-]?\d+)?")
"""The name of a mask that lies beside the image it belongs to."""


class Files(Pictures):
    def __init__(self, files: list[Path], labels: list[int], place: str, background: Background = WHITE) -> None:
        self.files, self.labels, self.place, self.background = files, np.array(labels), place, background

    def open(self, index: int) -> Image.Image:
        return decode(self.files[index], self.name(index), self.background)

    def name(self, index: int) -> str:
        return str(self.files[index])

    def key(self, index: int) -> str:
        return file_key(self.files[index], self.name(index))

    def inspect(self, index: int) -> Facts:
        try:
            content = self.files[index].read_bytes()
        except OSError as error:
            raise DataError(f"{self.files[index]} cannot be read as an image: {error.strerror}") from None
        return inspect(content, self.name(index))


def read_folder(options: ImagesData) -> tuple[list[str], Files, Files | None]:
    """The names of the classes, the images to train on, and those to validate on if there are any."""
    root = Path(str(options.root))
    if not root.is_dir():
        raise DataError(f"data.root: there is no folder {root}. It holds train/<class>/ with the images of each class")
    train = _one_of(root, ("train",))
    if train is None:
        raise DataError(
            f"data.root: {root} has no folder train (it has {_listed([path.name for path in root.iterdir()])}): "
            "put the class folders into train/"
        )
    found = list(dict.fromkeys(map(one_form, _class_folders(train))))
    classes = options.classes or sorted(found)
    if len(classes) < 2:
        raise DataError(f"{train} holds {len(classes)} class folders: to tell classes apart, it needs two or more")
    valid = _one_of(root, VALIDATION)
    if valid is None:
        _mention_other_folders(root, train, set(found), options.valid_fraction)
    background = _background(options)
    return classes, _files(train, classes, background), _files(valid, classes, background) if valid else None


def _one_of(root: Path, names: tuple[str, ...]) -> Path | None:
    """The folder with one of these names, in capitals or not."""
    found = sorted(path.name for path in root.iterdir() if path.name.lower() in names)
    if len(found) > 1:
        meant = "the validation data" if names == VALIDATION else "the training data"
        raise DataError(
            f"{root} has {' and '.join(found)}, and only one of them can be {meant}: rename or remove the other"
        )
    if found and not (root / found[0]).is_dir():
        raise DataError(f"{root / found[0]} is not a folder, or a link that leads nowhere: mend or remove it")
    return root / found[0] if found else None


def _mention_other_folders(root: Path, train: Path, classes: set[str], share: float) -> None:
    """Those with folders of the same classes, such as test: did somebody mean to validate on them?"""
    beside = [name for name in _class_folders(root) if name != train.name]
    if others := [name for name in beside if classes & set(map(one_form, _class_folders(root / name)))]:
        log.warning(
            f"{root}: {_listed(others)} beside {train.name} is not read; {share:.0%} of every class of {train.name} is held "
            f"out for validation. A folder named {VALIDATION[0]} would be validated on instead"
        )


def _background(options: ImagesData) -> Background:
    red, green, blue = options.background
    return red, green, blue


def _class_folders(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not is_left_by_a_system(path.name) and path.is_dir())


def _files(folder: Path, classes: list[str], background: Background) -> Files:
    files: list[Path] = []
    labels: list[int] = []
    others: list[Path] = []
    numbers = numbers_of(classes)
    for name in _class_folders(folder):
        if one_form(name) not in numbers:
            near = difflib.get_close_matches(name, classes, 1)
            raise DataError(
                f"{folder / name}: there is no class {name!r} {'in data.classes or ' if folder.name.lower() == 'train' else ''}"
                f"in training{f'; nearest: {near[0]!r}' if near else ''}. Rename or remove the folder"
            )
        images: list[Path] = []
        for file in _files_below(folder / name):
            (images if file.suffix.lower() in ENDINGS else others).append(file)
        if not images:
            raise DataError(
                f"{folder / name} has no images (files ending in {' '.join(sorted(ENDINGS))}): add some, or remove the folder"
            )
        files += images
        labels += [numbers[one_form(name)]] * len(images)
    _mention_masks(folder, files)
    if not files:
        raise DataError(f"{folder} holds no class folders: it needs one per class, with the images in them")
    _mention_left_out(folder, others)
    return Files(files, labels, str(folder.absolute()), background)


def _mention_left_out(folder: Path, others: list[Path]) -> None:
    loose = [path for path in folder.iterdir() if path.suffix.lower() in ENDINGS and not is_left_by_a_system(path.name)]
    if loose:
        log.warning(
            f"{folder}: {len(loose)} images lie in no class folder and are left out, {min(loose).name} first: put them into one"
        )
    if images := [path for path in others if path.suffix.lower() in NOT_READ]:
        log.warning(
            f"{folder}: {len(images)} files are of kinds that are not read, and are left out: {images[0]} for example. Convert "
            "them to PNG or JPEG to train on them"
        )
    rest = [path for path in others if path.suffix.lower() not in NOT_READ]
    if unnamed := _images_by_content(rest):
        log.warning(
            f"{folder}: {len(unnamed)} files hold images, but do not end as images do, and are left out: {unnamed[0]} for "
            "example. Rename them, to .jpg for example, to train on them"
        )
        found = set(unnamed)
        rest = [path for path in rest if path not in found]
    if rest:
        log.info(f"{folder}: {len(rest)} files do not end as images do and are left out, {rest[0].name} first")


def _mention_masks(folder: Path, files: list[Path]) -> None:
    """As in data sets that are made to segment: cat-3_mask.png beside cat-3.png."""
    known = {(file.parent, file.stem.lower()) for file in files}
    named = ((file, MASK.fullmatch(file.stem.lower())) for file in files)
    masks = [file for file, match in named if match is not None and (file.parent, match[1]) in known]
    if masks:
        log.warning(
            f"{folder}: {len(masks)} of {len(files)} images are named like masks of others, {masks[0]} for example, and are "
            "trained on like these. Remove them if they are masks"
        )


def _images_by_content(files: list[Path]) -> list[Path]:
    """Those that begin as images do. Of each ending, some are looked at: there may be a text beside every image."""
    found: list[Path] = []
    looked_at: Counter[str] = Counter()
    for file in files:
        looked_at[file.suffix.lower()] += 1
        if (file.suffix and looked_at[file.suffix.lower()] > LOOKED_AT) or not file.is_file():
            continue
        try:
            with Image.open(file, formats=FORMATS):
                found.append(file)
        except Exception:  # Pillow's plugins raise what they like
            continue
    return found


def _files_below(folder: Path) -> Iterator[Path]:
    """Sorted, those in folders below included; without what is hidden or left by a system."""

    def unreadable(error: OSError) -> None:
        raise DataError(
            f"{error.filename} cannot be read: {error.strerror}. Its images would be left out without a word"
        )

    above: dict[str, tuple[tuple[int, int], ...]] = {}
    for parent, folders, names in os.walk(folder, followlinks=True, onerror=unreadable):
        here = Path(parent).stat()
        way = above.get(os.path.dirname(parent), ())  # noqa: PTH120
        if (here.st_dev, here.st_ino) in way:
            raise DataError(
                f"{parent} is a link to a folder that it lies in, so there is no end to it: remove the link"
            )
        above[parent] = (*way, (here.st_dev, here.st_ino))
        folders[:] = sorted(name for name in folders if not is_left_by_a_system(name))
        for name in sorted(names):
            if not is_left_by_a_system(name):
                yield Path(parent, name)


def _listed(names: list[str]) -> str:
    shown = sorted(names)[:5]
    return ", ".join(shown) + (", …" if len(names) > len(shown) else "") if names else "nothing"
