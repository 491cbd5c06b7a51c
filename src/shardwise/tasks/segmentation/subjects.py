"""Who is segmented: the subjects of a folder, of a Decathlon data set or of the synthetic one, and who is held out."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.data.file_kinds import is_left_by_a_system
from shardwise.data.holdout import hold_out
from shardwise.errors import DataError
from shardwise.tasks.segmentation.config import SegmentationData, check_class_names
from shardwise.tasks.segmentation.synthetic import synthetic_root, synthetic_subjects

ENDINGS = (".nii.gz", ".nii")
VALIDATION = ("valid", "validation", "val")
"""The names that the folder of those who are held out may have, or their list in a dataset.json."""
AT_MOST = 8
"""Problems that one message names."""


@dataclass(frozen=True)
class Subject:
    name: str
    image: Path
    label: Path


@dataclass(frozen=True)
class Split:
    train: list[Subject]
    valid: list[Subject]
    held_out: bool
    """Whether the seed has chosen who is validated on, out of all subjects."""

    @property
    def all(self) -> list[Subject]:
        return self.train + self.valid


@dataclass(frozen=True)
class DatasetJson:
    """What is used of the dataset.json of a Decathlon task."""

    file: Path
    train: list[Subject]
    valid: list[Subject]
    """Empty where it lists nobody to validate on."""
    labels: Any
    """As they stand there; they need not be right where the config names the classes."""
    channels: int

    @property
    def classes(self) -> list[str]:
        return _class_names(self.file, self.labels)

    @property
    def names(self) -> list[str]:
        """Whatever is named, in either of the two ways in which such files are written."""
        both = [*self.labels, *self.labels.values()] if isinstance(self.labels, dict) else []
        return [name for name in both if isinstance(name, str)]

    def check_order(self, classes: list[str]) -> None:
        """Of names that the config gives. A class may be renamed, but the name of one cannot be that of another."""
        labels = dict(enumerate(self.labels)) if isinstance(self.labels, list) else self.labels
        numbers: dict[str, int] = {}
        for key, value in labels.items() if isinstance(labels, dict) else ():
            name, number = (value, key) if str(key).isdecimal() else (key, value)
            if str(number).isdecimal():
                numbers[alike(str(name))] = int(number)
        for place, name in enumerate(classes):
            if (there := numbers.get(alike(name), place)) != place:
                raise DataError(
                    f'data.classes: {name!r} is class {place} here, but class {there} in "labels" of {self.file}: '
                    "name the classes in the order of their numbers, or leave data.classes out"
                )


def find_subjects(options: SegmentationData, seed: int) -> Split:
    """Training and validation subjects, in an order that depends on nothing but their names and the seed."""
    if options.source == "synthetic":
        folder = synthetic_root(options, seed) / "train"
        names = synthetic_subjects(options)
        subjects = [Subject(name, folder / name / "img.nii.gz", folder / name / "label.nii.gz") for name in names]
        return _hold_out(subjects, options.valid_fraction, seed)
    root = _root(options)
    if options.source == "msd":
        listed = read_dataset_json(root)
        if listed.valid:
            return Split(listed.train, listed.valid, held_out=False)
        return _hold_out(listed.train, options.valid_fraction, seed)
    train = _subjects_in(root / "train")
    held_out = _validation_folder(root)
    if held_out is None:
        return _hold_out(train, options.valid_fraction, seed)
    return _apart(train, _subjects_in(held_out))


def read_dataset_json(root: Path) -> DatasetJson:
    file = root / "dataset.json"
    if not file.is_file():
        raise DataError(f"data.root: there is no {file}; source: msd reads a task folder of the Decathlon, unpacked")
    try:
        content = json.loads(file.read_text(encoding="utf-8-sig"))  # some editors begin it with a mark
    except ValueError as error:  # of JSON or of UTF-8
        raise DataError(f"{file} is not valid JSON: {error}") from None
    training = content.get("training") if isinstance(content, dict) else None
    if not isinstance(training, list) or not training:
        raise DataError(f'{file}: no list "training" of {{"image": …, "label": …}}')
    train = [_listed(root, file, "training", number, entry) for number, entry in enumerate(training)]
    valid = _validation_list(root, file, content)
    _each_once(file, train, valid)
    modalities = content.get("modality")
    channels = len(modalities) if isinstance(modalities, dict | list) and modalities else 1
    return DatasetJson(file, train, valid, content.get("labels"), channels)


def alike(name: str) -> str:
    """The same for names that mean the same class."""
    return " ".join(re.split(r"[\W_]+", name.casefold())).strip()


def several(problems: list[str]) -> DataError:
    """One error about all of them, so that they can be mended in one go."""
    more = [f"and {len(problems) - AT_MOST} more"] if len(problems) > AT_MOST else []
    return DataError("\n  ".join(problems[:AT_MOST] + more))


def _root(options: SegmentationData) -> Path:
    root = Path(str(options.root))
    if not root.is_dir():
        raise DataError(f"data.root: there is no folder {root} (looked for from {Path.cwd()})")
    return root


def _validation_folder(root: Path) -> Path | None:
    """None where there is none: a share is held out then, so a folder that only looks like one is told."""
    alike = sorted(path for path in root.iterdir() if _looks_like_validation(path))
    if len(alike) > 1:
        names = " and ".join(f"{path.name}/" for path in alike)
        raise DataError(f"{root} has {names}: leave one of them to validate on, and move the others away")
    if alike and alike[0].name not in VALIDATION:
        raise DataError(
            f"{alike[0]} would not be used: rename it to valid/ to validate on it, or move it away to hold out a share "
            "of train/"
        )
    if alike and not alike[0].is_dir():
        raise DataError(f"{alike[0]} is no folder, or a link that leads nowhere: mend it, or remove it")
    return alike[0] if alike else None


def unread_folders(root: Path) -> list[str]:
    """Beside train/, with subjects in them."""
    beside = (path for path in sorted(root.iterdir()) if path.name != "train" and not is_left_by_a_system(path.name))
    return [path.name for path in beside if any(path.glob("*/img.nii*"))]


def _looks_like_validation(path: Path) -> bool:
    name = path.name.lower()
    if name in VALIDATION:
        return True
    return path.is_dir() and (re.fullmatch(r"val(id|idat(e|ion))?([_-]?(set|data|\d+))?|vaild", name) is not None)


def _subjects_in(folder: Path) -> list[Subject]:
    if not folder.is_dir():
        raise DataError(f"data.root: there is no folder {folder}; source: folder reads train/<subject>/img.nii.gz")
    there = sorted(path for path in folder.iterdir() if not is_left_by_a_system(path.name))
    if not any(path.is_dir() for path in there):
        raise DataError(f"{folder} holds no subjects: put each into a folder of its own, <subject>/img.nii.gz")
    found: list[Subject] = []
    problems: list[str] = []
    for path in there:
        if path.is_dir():
            try:
                found.append(_subject_in(path))
            except DataError as error:
                problems.append(str(error))
        elif not path.exists():
            problems.append(f"{path} is a link that leads nowhere: mend it, or remove it")
        elif path.name.lower().endswith(ENDINGS):  # anything else, such as a README, is nobody's scan
            problems.append(f"{path} is in no subject's folder: move it to {folder}/<subject>/, or remove it")
    if problems:
        raise several(problems)
    return found


def _subject_in(folder: Path) -> Subject:
    image, label = (_file(folder, stem) for stem in ("img", "label"))
    if image and label:
        subject = Subject(folder.name, image, label)
        if problem := _same_file(subject):
            raise DataError(problem)
        return subject
    if image:
        raise DataError(f"{image} has no label: add {folder / 'label.nii.gz'}, or remove the subject")
    if label:
        raise DataError(f"{label} has no image: add {folder / 'img.nii.gz'}, or remove the subject")
    raise DataError(f"{folder} has neither img.nii.gz nor label.nii.gz: add them, or remove the folder")


def _file(folder: Path, stem: str) -> Path | None:
    there = [file for ending in ENDINGS if (file := folder / f"{stem}{ending}").is_symlink() or file.exists()]
    for file in there:
        if not file.is_file():
            what = "a folder" if file.is_dir() else "a link that leads nowhere"
            raise DataError(f"{file} is {what}: put the file itself there, or remove the subject")
    if len(there) > 1:
        raise DataError(
            f"{folder} has both {' and '.join(file.name for file in there)}: remove the one that is not meant"
        )
    return there[0] if there else None


def _same_file(subject: Subject) -> str | None:
    if subject.image.resolve() == subject.label.resolve():
        return f"{subject.label} is the image itself: the label must be a file of its own"
    return None


def _validation_list(root: Path, file: Path, content: dict[str, Any]) -> list[Subject]:
    keys = [key for key in VALIDATION if content.get(key)]
    if len(keys) > 1:
        raise DataError(f"{file} has the lists {' and '.join(keys)}: leave one of them to validate on")
    if keys and not isinstance(content[keys[0]], list):
        raise DataError(f'{file}: "{keys[0]}" must be a list of {{"image": …, "label": …}}, or be left out')
    return [_listed(root, file, key, number, entry) for key in keys for number, entry in enumerate(content[key])]


def _listed(root: Path, file: Path, key: str, number: int, entry: Any) -> Subject:
    image, label = (entry.get("image"), entry.get("label")) if isinstance(entry, dict) else (None, None)
    if not (isinstance(image, str) and isinstance(label, str) and image and label):
        raise DataError(f'{file}: entry {number} of "{key}" must be {{"image": …, "label": …}}, not {entry!r}')
    return Subject(Path(image).name.partition(".nii")[0], root / image, root / label)


def _each_once(file: Path, train: list[Subject], valid: list[Subject]) -> None:
    """Listed twice, an image could be trained on and held out at once; a label twice is one of another image."""
    lists = "the lists to train and to validate on" if valid else "the training list"
    seen: set[Path] = set()
    for subject in train + valid:
        if problem := _same_file(subject):
            raise DataError(f"{file}: {problem}")
        for listed, shown in ((subject.image, subject.image.name), (subject.label, f"the label {subject.label.name}")):
            if listed.resolve() in seen:
                raise DataError(f"{file}: {shown} stands twice in {lists}; remove one of the two")
            seen.add(listed.resolve())


def _class_names(file: Path, labels: Any) -> list[str]:
    """{"0": "background", "1": "liver"}: the names in the order of their numbers."""
    numbers = [int(key) for key in labels if key.isdigit()] if isinstance(labels, dict) else []
    if len(numbers) < 2 or sorted(numbers) != list(range(len(numbers))):
        raise DataError(
            f'{file}: "labels" must name the classes from "0" (background) on without gaps, not {labels!r}; or set data.classes'
        )
    names = [str(labels[str(number)]) for number in range(len(numbers))]
    try:
        check_class_names(names)
    except ValueError as error:
        raise DataError(f'{file}: "labels": {error}; or set data.classes') from None
    return names


def _hold_out(subjects: list[Subject], share: float, seed: int) -> Split:
    if len(subjects) < 2:
        raise DataError(
            f"{len(subjects)} subject cannot be split into training and validation ({subjects[0].image}): "
            "there must be two or more"
        )
    train, valid = ([subjects[index] for index in part] for part in hold_out(len(subjects), share, seed))
    return Split(train, valid, held_out=True)


def _apart(train: list[Subject], valid: list[Subject]) -> Split:
    """A link from valid/ into train/ would be validated on after it was trained on."""
    trained = {subject.image.resolve() for subject in train}
    if both := [subject for subject in valid if subject.image.resolve() in trained]:
        raise several([f"{subject.image} is also in train/: remove it from one of the two" for subject in both])
    return Split(train, valid, held_out=False)
