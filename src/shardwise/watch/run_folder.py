"""The folder of a run: what was asked, where and with what it ran, and what came out of it."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch

import shardwise
from shardwise.config import Config, Training
from shardwise.config.by_key import by_dotted_key
from shardwise.config.commands import FRESH, RESUME, twice_as_long, user_command
from shardwise.config.plain_files import MOST_LEVELS, is_count, open_plain, parse_json, read_plain
from shardwise.config.secrets import without_secrets
from shardwise.config.yaml_lines import read_file, read_yaml
from shardwise.config.yaml_reader import write_yaml
from shardwise.errors import ConfigError, LaunchError
from shardwise.watch.held_folder import HeldFolder
from shardwise.watch.lock import LOCK, lock_folder, unlock
from shardwise.watch.run_key import NAME as KEY

log = logging.getLogger(__name__)

MOST_FACTS = 2**20
"""Bytes of run.json, and of a line of a log."""
MOST_LOG = 2**30
MOST_BATCH = 2**40
_CHECKPOINT = re.compile(r"(\.replaced-|damaged-)?step-\d{8,}(-\d+)?")
"""Folders that hold a checkpoint of this run, or what is left of one. A superseded one is of a run before it."""


class RunFolder:
    def __init__(self, path: Path, rank: int = 0) -> None:
        self.path = path
        self.rank = rank
        self._working = Path.cwd()
        """A task may change the working folder."""
        self._streams: dict[Path, IO[str]] = {}
        self._lock: int | None = None
        self._lock_elsewhere: int | None = None
        self.held: HeldFolder | None = None
        """This folder, which must stay what and where it is."""
        self._troubled: set[Path] = set()
        """Files that could not be written, or are gone, which was said once."""
        self._aside: Path | None = None
        """Where the run went that lay here before."""
        self._made: list[Path] = []
        """Folders that were not there, the innermost first."""
        self.begins_anew = False
        """Here lies a start that came to no step: what it has measured is measured again."""

    @property
    def rank_file(self) -> Path:
        return self.path / "ranks" / f"rank-{self.rank:04d}.jsonl"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    def claim(self, *, resume: bool, fresh: bool, training: Training, checkpoints: Path | None = None) -> str | None:
        """Rank 0, before anything else: make the folder, or say why not. Returns a notice for the user, if any.

        `checkpoints`: their folder, which is held too where it lies elsewhere.
        """
        notice = None
        if self.path.is_dir():
            self._lock = lock_folder(self.path)
        if (self.path / "run.json").exists() and not resume:
            if not self._has_begun(checkpoints):
                # In the same folder, and not beside it: whoever mends a mistake step by step would get a folder for each.
                self.begins_anew = True
                logs = self.path / "ranks"
                kept = f"; what its ranks said stays in {logs}" if any(logs.glob("*.log")) else ""
                notice = f"the start that lies in {self.path} came to no step: this run takes its place{kept}"
            elif not fresh:
                raise LaunchError(self._already_holds_a_run(training))
            else:
                notice = f"the earlier run was moved to {self._move_aside()}"
        self._made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        if _has_key_alone(self.path):
            self._made = [self.path]
        try:
            (self.path / "ranks").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LaunchError(f"the run folder {self.path} cannot be made: {error.strerror}") from None
        if self._lock is None or self._aside is not None:
            before, self._lock = self._lock, lock_folder(self.path)
            unlock(before)
        if checkpoints is not None and self.path.resolve() not in checkpoints.resolve().parents:
            try:
                checkpoints.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise LaunchError(f"the checkpoint folder {checkpoints} cannot be made: {error.strerror}") from None
            self._lock_elsewhere = lock_folder(checkpoints)
        return notice

    def hold(self) -> None:
        """Every rank, once the folder is there."""
        with contextlib.suppress(OSError):  # on another machine it may be seen a moment later
            self.held = HeldFolder(self.path, "run folder")

    def _move_aside(self) -> Path:
        aside = next(p for n in range(1, 10_000) if not (p := Path(f"{self.path}-{n}")).exists())
        self.path.rename(aside)
        self._aside = aside
        return aside

    def _has_begun(self, checkpoints: Path | None) -> bool:
        """Whether the run that lies here has made a step or put a checkpoint in place: of its first step, every rank tells."""
        for file in (self.metrics_file, *(self.path / "ranks").glob("rank-*.jsonl")):
            if any(_is_progress(line) for line in _lines(file)):
                return True
        before = self._config_before().get("training")
        elsewhere = before.get("checkpoint_dir") if isinstance(before, dict) else None
        folders = [self.path / "checkpoints", checkpoints, Path(elsewhere) if isinstance(elsewhere, str) else None]
        return any(
            _CHECKPOINT.fullmatch(each.name)
            for folder in folders
            if folder is not None and folder.is_dir()
            for each in folder.iterdir()
        )

    def _already_holds_a_run(self, training: Training) -> str:
        anew = f"start anew and keep the old one beside:  {user_command(FRESH)}"
        made = self._steps_if_finished()
        before = self._config_before().get("training")
        lengths = ("max_epochs", "max_steps")
        if made is None or not isinstance(before, dict) or any(before.get(k) != getattr(training, k) for k in lengths):
            return f"{self.path} already holds a run. Go on with it:  {user_command(RESUME, 'auto')}\n  or {anew}"
        longer = user_command(RESUME, "auto", *twice_as_long(training))
        return (
            f"{self.path} already holds a run, and it is finished: all of its {made} steps are made. Go on for as long again:  "
            f"{longer}\n  or {anew}"
        )

    def _steps_if_finished(self) -> int | None:
        """How many the run has made, if those are all."""
        try:
            total = (self._facts() or {}).get("total_steps")
        except LaunchError:
            return None
        made = max((_step_in(record) for record in self.metrics()), default=0)
        return made if is_count(total) and 0 < total <= made else None

    def _config_before(self) -> dict[str, Any]:
        """Of the run that lies here, as it was written down."""
        try:
            values = read_yaml(read_file(self.path / "config.yaml"), "it").values
        except ConfigError:
            return {}
        return values if isinstance(values, dict) else {}

    def _facts(self) -> dict[str, Any] | None:
        """What the run that lies here has written of itself; None: nothing."""
        try:
            facts = parse_json(read_plain(self.path / "run.json", MOST_FACTS), MOST_LEVELS)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise self._cannot_be_believed(str(error)) from None
        if not isinstance(facts, dict):
            raise self._cannot_be_believed("it is not a block of facts")
        return facts

    def _cannot_be_believed(self, why: str) -> LaunchError:
        file = self.path / "run.json"
        return LaunchError(
            f"{file} cannot be used: {why}. It says with which global batch the run began. Put it back as it was, or "
            "remove it: then the run goes on with the batch that the config says"
        )

    def had_checkpoint(self) -> int | None:
        """The step of the newest checkpoint that this run has put in place, as its own log has it."""
        records = (_record(line) for line in _lines(self.path / "ranks" / "rank-0000.jsonl"))
        steps = [_step_in(each) for each in records if "checkpoint" in each and not each.get("problem")]
        return max(steps, default=None)

    def abandon(self) -> None:
        """Rank 0, when nothing came of the start: leave no half of a run, and put an earlier one back."""
        if (self.path / "run.json").exists():
            return
        shutil.rmtree(self.path / "ranks", ignore_errors=True)
        (self.path / LOCK).unlink(missing_ok=True)
        if self.path in self._made:
            (self.path / KEY).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # somebody has put something there: it stays
            for folder in self._made:
                folder.rmdir()
            if self._aside is not None:
                self._aside.rename(self.path)

    def changes_to(self, config: Config) -> list[str]:
        """What the config of the run that lies here said otherwise. That config is kept beside the new one."""
        file = self.path / "config.yaml"
        before, now = by_dotted_key(self._config_before()), by_dotted_key(config.model_dump(mode="json"))
        if not self._config_before():
            return []
        changed = [key for key in {**before, **now} if before.get(key) != now.get(key)]
        if changed:
            kept = next(p for n in range(1, 10_000) if not (p := self.path / f"config-{n}.yaml").exists())
            shutil.copy(file, kept)
        return [f"{key}: {before.get(key)} → {now.get(key)}" for key in changed]

    def batch_so_far(self) -> tuple[int, int] | None:
        """The global batch of the run in this folder, and the number of devices it was chosen for."""
        batch = (self._facts() or {}).get("batch")
        if batch is None:
            return None
        known = batch if isinstance(batch, dict) else {}
        size, devices = known.get("global"), known.get("chosen_for")
        if not is_count(size) or not is_count(devices) or not (0 < size < MOST_BATCH and 0 < devices < MOST_BATCH):
            raise self._cannot_be_believed("it does not say that batch, and for how many devices it was chosen")
        return size, devices

    def evaluated_at(self, step: int) -> bool:
        return any("eval" in record and record.get("step") == step for record in self.metrics())

    def describe(self, config: Config, facts: dict[str, Any]) -> None:
        _replace(self.path / "config.yaml", dump_config(config))
        content = {
            "shardwise": shardwise.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "host": platform.node(),
            "command": without_secrets(sys.argv),
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            **facts,
        }
        _replace(self.path / "run.json", json.dumps(content, indent=1) + "\n")

    def forget_after(self, step: int) -> None:
        """A resumed run computes the steps after its checkpoint again: their old lines would stand there twice.

        Each rank does so in its own file, rank 0 in the metrics too.
        """
        for file in [self.rank_file, *([self.metrics_file] if self.rank == 0 else [])]:
            if file in self._streams:  # it would go on writing into the file that is replaced
                self._streams.pop(file).close()
            if not file.exists():
                continue
            try:
                kept = [line for line in _lines(file) if _step_of(line) <= step]
                _replace(file, "".join(f"{line}\n" for line in kept))
            except OSError as error:
                log.warning("%s cannot be written: %s; it has some steps twice now", file, error.strerror)

    def metrics(self) -> list[dict[str, Any]]:
        """Of every line that is whole: a kill may have cut the last one off."""
        return [record for line in _lines(self.metrics_file) if (record := _record(line))]

    def add_metrics(self, record: dict[str, Any]) -> None:
        self._append(self.metrics_file, record)

    def add_telemetry(self, record: dict[str, Any]) -> None:
        self._append(self.rank_file, record)

    def close(self) -> None:
        for stream in self._streams.values():
            with contextlib.suppress(OSError):
                stream.close()
        unlock(self._lock)
        unlock(self._lock_elsewhere)
        self._lock = self._lock_elsewhere = None

    def _append(self, file: Path, record: dict[str, Any]) -> None:
        """A disk that is full or gone for a while must not end a training: what could not be written is kept for later."""
        try:
            stream = self._stream(file)
            if stream is not None:
                stream.write(json.dumps(record) + "\n")
                stream.flush()
        except OSError as error:
            self._tell(file, f"{file} cannot be written: {error.strerror}; training goes on")

    def _stream(self, file: Path) -> IO[str] | None:
        """Open, and still the file of this name: what is written to one that was deleted is read by nobody."""
        stream, place = self._streams.get(file), self._working / file
        if stream is not None and _is_still(stream, place):
            return stream
        if lost := self.held.lost() if self.held is not None else "":
            self._tell(file, f"{lost}; {file.name} is not written here any more. The next checkpoint ends the run")
            return stream
        if stream is not None:
            self._tell(file, f"{file} was deleted or replaced while the run is going on: its earlier lines are gone")
            with contextlib.suppress(OSError):
                self._streams.pop(file).close()
        self._streams[file] = place.open("a")
        return self._streams[file]

    def _tell(self, file: Path, what: str) -> None:
        """Once of each file."""
        if file not in self._troubled:
            log.warning(what)
        self._troubled.add(file)


def _is_still(stream: IO[str], file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(stream.fileno()), file.stat())
    except (FileNotFoundError, NotADirectoryError):
        return False


def _replace(file: Path, text: str) -> None:
    """Whole or as it was: a full disk must not leave an empty file."""
    aside = file.with_name(f".{file.name}.writing")
    aside.write_text(text)
    aside.replace(file)


def dump_config(config: Config) -> str:
    return write_yaml(config.model_dump(mode="json"))


def _lines(file: Path) -> Iterator[str]:
    """Of a run's log; none where there is none."""
    try:
        with open_plain(file, follow=True) as opened, io.BufferedReader(opened) as stream:
            if os.fstat(stream.fileno()).st_size > MOST_LOG:
                raise ValueError(f"it has more than {MOST_LOG} bytes")
            while line := stream.readline(MOST_FACTS):
                yield line.decode(errors="replace").rstrip("\r\n")
    except FileNotFoundError:
        return
    except OSError as error:
        raise LaunchError(f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise LaunchError(f"{file} is no log of a run: {error}") from None


def _record(line: str) -> dict[str, Any]:
    """Of a run's log; empty where a kill has cut it off."""
    try:
        record = parse_json(line.encode(), MOST_LEVELS)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def _step_in(record: dict[str, Any]) -> int:
    step = record.get("step")
    return step if is_count(step) else 0


def _has_key_alone(folder: Path) -> bool:
    """The ranks of several machines have just made it, to know each other."""
    return folder.is_dir() and {each.name for each in folder.iterdir()} == {KEY}


def _is_progress(line: str) -> bool:
    """Whether a line of a run's log tells of a step, or of a checkpoint, of which there may be one before the first step."""
    record = _record(line)
    return _step_in(record) > 0 or ("checkpoint" in record and not record.get("problem"))


def unused_folder(path: Path) -> Path:
    """This one, or one of this name and a number, that is not there yet."""
    every = (path, *(path.with_name(f"{path.name}-{number}") for number in range(2, 10_000)))
    return next(each for each in every if not each.exists())


def _step_of(line: str) -> int:
    step = _record(line).get("step")
    return step if is_count(step) else sys.maxsize  # a line cut off by a kill
