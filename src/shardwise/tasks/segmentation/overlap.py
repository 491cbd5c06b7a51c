"""What tells subjects apart: the files of their images."""

from __future__ import annotations

from shardwise.data.file_contents import file_contents
from shardwise.data.overlap import ANY, NEVER, Contents, SampleContents
from shardwise.tasks.segmentation.subjects import Split, Subject


def subject_contents(split: Split) -> SampleContents:
    numbers = file_contents([subject.image for subject in split.all])
    train, valid = numbers[: len(split.train)], numbers[len(split.train) :]
    held_out = bool({_home(subject) for subject in split.train} & {_home(subject) for subject in split.valid})
    return SampleContents(
        Contents(train, lambda place: str(split.train[place].image)),
        Contents(valid, lambda place: str(split.valid[place].image)),
        unit="subjects",
        error_above=NEVER if held_out else ANY,
        held_out=held_out,
    )


def _home(subject: Subject) -> str:
    """The folder that holds the subjects: train/, valid/, or one for all of them."""
    return str(subject.image.parent.parent)
