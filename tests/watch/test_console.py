"""What is logged becomes the lines that a person reads: where, marked how, and how much of it."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.errors import ConfigError
from shardwise.watch.console import LOG_LEVEL, PLAIN, Console, follow_log_level, program_logging, set_log_level

log = logging.getLogger("shardwise.tasks.some")


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    logger = logging.getLogger("shardwise")
    before = logger.level, logger.propagate, list(logger.handlers)
    yield
    assert (logger.level, logger.propagate, logger.handlers) == before


def test_the_program_writes_to_stderr_and_marks_all_but_information(capsys: pytest.CaptureFixture[str]) -> None:
    with program_logging():
        set_log_level("debug")
        log.debug("how")
        log.info("50% done")
        log.warning("%s is full\nsecond line", "the disk")
        log.error("gone")
        log.warning("rank 1 was killed", extra=PLAIN)
    said = capsys.readouterr()
    assert said.err.splitlines() == [
        "debug: how",
        "50% done",
        "warning: the disk is full",
        "second line",
        "error: gone",
        "rank 1 was killed",
    ]
    assert said.out == ""


@pytest.mark.parametrize(
    ("level", "told"), [("debug", "diwe"), ("info", "iwe"), ("warning", "we"), ("error", "e"), (None, "iwe")]
)
def test_a_level_leaves_out_what_lies_below_it(
    level: str | None, told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if level is not None:
        monkeypatch.setenv(LOG_LEVEL, level)
    with program_logging():
        follow_log_level()
        for letter, number in zip("diwe", (10, 20, 30, 40), strict=True):
            log.log(number, letter, extra=PLAIN)
    assert "".join(capsys.readouterr().err.split()) == told


def test_a_level_that_does_not_exist_is_answered_with_those_that_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOG_LEVEL, "loud")
    with pytest.raises(ConfigError, match="SHARDWISE_LOG_LEVEL=loud: must be one of debug, info, warning, error"):
        follow_log_level()


def test_rank_0_speaks_for_the_run_and_the_others_write_what_they_log_to_their_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in (0, 1):
        with program_logging():
            console = Console(rank, 2, tmp_path)
            try:
                console.say("step 1\n")
                console.warn("slow")
                log.warning("no room on rank %d", rank)
                print("printed by a task")
            finally:
                console.close()
            log.error("back on stderr")
    said = capsys.readouterr()
    assert said.out.splitlines() == [
        "[rank 0] step 1",
        "[rank 0] ",
        "[rank 0] warning: slow",
        "[rank 0] warning: no room on rank 0",
        "[rank 0] printed by a task",
    ]
    assert said.err == "error: back on stderr\n" * 2
    own = (tmp_path / "ranks" / "rank-0001.log").read_text()
    assert own == "[rank 1] warning: no room on rank 1\n[rank 1] printed by a task\n"


def test_a_console_says_as_much_as_the_level_lets_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LOG_LEVEL, "warning")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    console = Console(0, 1, tmp_path)
    try:
        console.say("step 1")
        console.show("the live line")
        console.warn("slow")
    finally:
        console.close()
    assert capsys.readouterr().out == "warning: slow\n"


def test_a_handler_and_a_level_of_the_users_own_are_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: heard.append(record.getMessage()))
    logger = logging.getLogger("shardwise")
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    try:
        console = Console(0, 1, tmp_path)
        console.say("step 1")
        console.warn("slow")
        console.close()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    assert heard == ["slow"] and capsys.readouterr().out == "warning: slow\n"


def test_words_that_do_not_fit_their_arguments_do_not_end_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    console = Console(0, 1, tmp_path)
    try:
        log.info("%d samples", "many")
        log.info("goes on")
    finally:
        console.close()
    assert capsys.readouterr().out == "goes on\n"


def test_in_a_loop_of_ones_own_warnings_reach_stderr_and_information_does_not() -> None:
    """No console: the standard library's last resort."""
    program = (
        "import logging, shardwise\n"
        "log = logging.getLogger('shardwise.engine.checkpointing')\n"
        "log.info('unheard'); log.warning('heard')\n"
        "logging.basicConfig(format='%(name)s %(message)s', level='INFO'); log.info('asked for')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "" and done.stderr == "heard\nshardwise.engine.checkpointing asked for\n"
