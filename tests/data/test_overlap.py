"""What is said when training and validation share samples."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwise.data.overlap import ANY, MOST, NEVER, Contents, SampleContents, check_overlap
from shardwise.errors import DataError


def contents(numbers: list[int], name: str) -> Contents:
    return Contents(np.array(numbers, np.uint64), lambda place: f"{name}-{place}")


def two_parts(train: list[int], valid: list[int] | None, **options: Any) -> SampleContents:
    held = None if valid is None else contents(valid, "valid")
    return SampleContents(contents(train, "train"), held, **{"unit": "games", **options})


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level(logging.INFO, "shardwise")
    return lambda: [(record.levelname, record.getMessage()) for record in caplog.records]


def test_parts_that_share_nothing_are_passed_over_in_silence(said: Any) -> None:
    check_overlap(two_parts([1, 2, 3], [4, 5]), allowed=False)
    check_overlap(two_parts([1, 2, 3], None), allowed=False)
    check_overlap(two_parts([1, 2, 3], []), allowed=False)
    assert said() == []


@pytest.mark.parametrize(
    ("train", "valid", "error_above", "refused"),
    [
        ([1, 2, 3, 4], [3, 9, 8, 7], ANY, True),
        ([1, 2, 3, 4], [3, 9, 8, 7], MOST, False),
        ([1, 2, 3, 4], [3, 4, 8, 7], MOST, False),
        ([1, 2, 3, 4], [3, 4, 1, 7], MOST, True),
        ([1, 2, 3, 4], [3, 4, 1, 2], NEVER, False),
    ],
)
def test_sharing_is_an_error_above_the_share_that_may_be_chance_and_else_a_warning(
    said: Any, train: list[int], valid: list[int], error_above: float, refused: bool
) -> None:
    shared = len(set(train) & set(valid))
    message = (
        rf"^{shared} of 4 validation games \({shared * 25}%\) (is|are) in the training data, too: valid-0 is the same as train-2"
        r".*What is trained on cannot be used to validate: take them out of one of the two"
    )
    if refused:
        with pytest.raises(DataError, match=message + "; or, if it is meant so, set data.allow_shared_samples: true$"):
            check_overlap(two_parts(train, valid, error_above=error_above), allowed=False)
        assert said() == []
    else:
        check_overlap(two_parts(train, valid, error_above=error_above), allowed=False)
        ((level, text),) = said()
        assert level == "WARNING" and re.match(message + "$", text)


def test_what_is_allowed_is_told_once_as_a_warning(said: Any) -> None:
    check_overlap(two_parts([1, 2], [1, 2], error_above=ANY), allowed=True)
    ((level, text),) = said()
    assert level == "WARNING" and text.startswith("2 of 2 validation games (100%) are in the training data, too")
    assert text.endswith("It is allowed by data.allow_shared_samples: true")


def test_samples_that_shardwise_held_out_itself_are_told_with_another_advice(said: Any) -> None:
    check_overlap(
        two_parts([1, 2], [2], error_above=NEVER, held_out=True, looked_at=" (2 of 9 compared)"), allowed=False
    )
    ((level, text),) = said()
    assert level == "WARNING"
    assert text == (
        "1 of 1 validation games (100%) is in the training data, too: valid-0 is the same as train-1 (2 of 9 compared). What "
        "is trained on cannot be used to validate. The seed held them out of data with copies in it: remove the copies, or "
        "name other games to validate on"
    )


def test_where_the_config_can_name_no_others_to_validate_on_that_is_no_advice_and_copies_are_told_along(
    said: Any,
) -> None:
    check_overlap(two_parts([1, 2, 2], [2], error_above=NEVER, held_out=True, can_name=False), allowed=False)
    ((level, text),) = said()
    assert level == "WARNING"
    assert text.endswith(
        "The seed held them out of data with copies in it: remove the copies. 1 of 3 training games (33%) is a copy of others, "
        "and trained on as often as they are there: train-2 is the same as train-1"
    )


def test_copies_within_training_are_one_line_of_information(said: Any) -> None:
    check_overlap(two_parts([5, 6, 5, 5, 6, 7], [8]), allowed=False)
    assert said() == [
        (
            "INFO",
            "3 of 6 training games (50%) are copies of others, and trained on as often as they are there: train-2 is the same "
            "as train-0, for example",
        )
    ]


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("path", r"one.txt is named twice"),
        ("link", r"one.txt and .*/two.txt are one file under two names"),
        ("hard link", r"one.txt and .*/two.txt are one file under two names"),
        ("copy", r"one.txt and .*/two.txt have the same content"),
    ],
)
def test_a_file_of_many_samples_that_is_there_twice_is_an_error_that_names_both(
    tmp_path: Path, said: Any, kind: str, what: str
) -> None:
    one, two, other = (tmp_path / f"{name}.txt" for name in ("one", "two", "other"))
    one.write_text("a game")
    other.write_text("no game")
    if kind == "copy":
        two.write_text("a game")
    elif kind == "link":
        two.symlink_to(one)
    elif kind == "hard link":
        two.hardlink_to(one)
    files = [other, one, one if kind == "path" else two]
    message = rf"^data: .*{what}, so its samples would be trained on twice, or trained on and validated on"
    with pytest.raises(DataError, match=message):
        check_overlap(two_parts([1], [2], files=files), allowed=False)
    check_overlap(two_parts([1], [2], files=files), allowed=True)
    assert [level for level, _ in said()] == ["WARNING"]
    check_overlap(two_parts([1], [2], files=[other, one]), allowed=False)


def test_small_shares_are_not_rounded_to_nothing(said: Any) -> None:
    check_overlap(two_parts([1], [*range(1, 5000)]), allowed=False)
    assert "(less than 0.1%)" in said()[0][1]
    check_overlap(two_parts([1], [*range(1, 500)]), allowed=False)
    assert "(0.2%)" in said()[1][1]
