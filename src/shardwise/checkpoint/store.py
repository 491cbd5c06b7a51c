"""The folder of checkpoints: written aside, checked, flushed, and only then renamed into place."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shardwise.checkpoint.inspect import condition_of_checkpoint
from shardwise.data.manifest import (
    Condition,
    FileEntry,
    NewerVersion,
    Unreadable,
    condition_of,
    flush,
    problems_of,
    read_manifest,
    write_manifest,
)
from shardwise.errors import CheckpointError
from shardwise.watch.held_folder import HeldFolder

_STEP = re.compile(r"^step-(\d{8,})$")
_REPLACED, _DAMAGED, _SUPERSEDED = ".replaced-", "damaged-", "superseded-"
_LOOKS = 5
"""How often a folder is looked through anew whose run removes checkpoints meanwhile."""
Check = Callable[[Path], Condition]


class NewerCheckpoint(CheckpointError):
    """A newer shardwise wrote it: neither damage, nor to be passed over."""

    @classmethod
    def of(cls, path: Path, why: str) -> NewerCheckpoint:
        return cls(
            f"checkpoint {path} cannot be read by this shardwise: {why}. It is left as it is, and no earlier one is taken in its "
            "place. Update shardwise, or name an earlier checkpoint by its path"
        )


@dataclass(frozen=True)
class Found:
    path: Path
    step: int
    metric: float | None
    readable: bool = True
    """Whether storage gave its manifest."""
    newer: str = ""
    """Which version it is of, where a newer shardwise wrote it."""


class CheckpointStore:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.passed_over: set[Path] = set()
        """Checkpoints that could not be read at the last look: they are left as they are."""
        self.held: list[HeldFolder] = []
        """Folders that must stay what and where they are while checkpoints are written: this one, once it is there."""

    def hold(self) -> None:
        """From now on, the folder must stay what and where it is, if it is there already."""
        if self.folder.is_dir() and all(each.path != self.folder for each in self.held):
            self.held.append(HeldFolder(self.folder, "checkpoint folder"))

    def begin(self, step: int) -> Path:
        """An empty folder aside, for one checkpoint. What an interrupted one left there is cleared away.

        StorageLost: a folder of the run is no longer there. It is not made anew: without what it held, it is another run's.
        """
        for folder in self.held:
            folder.confirm()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.hold()
        aside = self.aside(step)
        if aside.exists():
            shutil.rmtree(aside)
        aside.mkdir()
        return aside

    def discard(self, step: int) -> None:
        """Remove what was written aside of a checkpoint that came to nothing: a full disk needs the room."""
        shutil.rmtree(self.aside(step), ignore_errors=True)

    def place(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def aside(self, step: int) -> Path:
        return self.folder / f".writing-step-{step:08d}"

    def commit(self, step: int, files: dict[str, FileEntry], progress: dict[str, object]) -> Path:
        """Durable, then visible: the rename is what makes it exist."""
        aside, final = self.aside(step), self.place(step)
        for name in files:
            flush(aside / name)
        write_manifest(aside, files, progress)
        replaced = self.folder / f"{_REPLACED}{final.name}"
        if final.exists():  # from before a resume at an earlier step
            if newer := _newer(final):
                raise NewerCheckpoint.of(final, newer)
            if replaced.exists():
                shutil.rmtree(replaced)
            final.rename(replaced)
        aside.rename(final)
        flush(self.folder)
        if replaced.exists():
            shutil.rmtree(replaced)
        return final

    def every(self) -> list[Found]:
        """The checkpoints in place, oldest first. Their contents are not checked here.

        Where a commit was interrupted between its two renames, the one that was to be replaced still counts.
        """
        if not self.folder.is_dir():
            return []
        found = []
        names = {path.name for path in self.folder.iterdir()}
        for name in names:
            match = _STEP.match(name.removeprefix(_REPLACED))
            if not match or (name.startswith(_REPLACED) and match.group() in names):
                continue
            path, metric, readable, newer = self.folder / name, None, True, ""
            try:
                metric = _number(read_manifest(path)["about"].get("metric"))
            except Unreadable:
                readable = False
            except NewerVersion as error:
                newer = str(error)
            except ValueError:
                pass
            found.append(Found(path, int(match.group(1)), metric, readable, newer))
        return sorted(found, key=lambda item: item.step)

    def newest_whole(
        self, among: list[Path] | None = None, check: Check = condition_of_checkpoint, *, act: bool = True
    ) -> tuple[Path | None, list[str]]:
        """The newest checkpoint that passes every check, and a sentence about each newer one that does not.

        Damaged ones are renamed, not deleted: they no longer count, and what is left of them stays. Those that storage
        does not give are passed over for now. Where there is no whole one, nothing is changed. One of a newer version is an
        error. Where several processes look together, one of them acts; with `act` false, nobody does.
        """
        for _ in range(_LOOKS):
            bad: list[tuple[Path, Condition]] = []
            whole, gone = None, False
            for path in reversed([found.path for found in self.every()] if among is None else among):
                condition = check(path)
                if condition.newer:
                    raise NewerCheckpoint.of(path, condition.newer)
                if not condition.problems:
                    whole = path
                    break
                if path.is_dir():
                    bad.append((path, condition))
                else:  # a run that is going on has removed it
                    gone = True
            if whole is not None or not gone or among is not None:
                break
        self.passed_over = {path for path, condition in bad if condition.unreadable}
        return whole, [self._passed_over(path, condition, act=act and whole is not None) for path, condition in bad]

    def _passed_over(self, path: Path, condition: Condition, *, act: bool) -> str:
        problems = "; ".join(condition.problems)
        if condition.unreadable:
            return f"checkpoint {path} cannot be read, is passed over and left as it is: {problems}"
        return f"checkpoint {path} is damaged{self._set_aside(path) if act else ''}: {problems}"

    def _set_aside(self, path: Path) -> str:
        damaged = self._free_name(f"{_DAMAGED}{path.name.removeprefix(_REPLACED)}")
        try:
            path.rename(damaged)
        except OSError as error:
            return f" and could not be set aside ({error.strerror})"
        return f" and set aside as {damaged.name}"

    def best_whole(self, mode: str) -> tuple[Path, list[str]]:
        """For a reader, who changes nothing: the best checkpoint that passes every check, or the newest where none was
        evaluated; and a sentence about each that may be better and does not."""
        self.refuse_newer()
        for _ in range(_LOOKS):
            unknown = [found.path for found in self.every() if found.metric is None]
            from_worst = [found.path for found in reversed(self._by_metric(mode))]
            whole, complaints = self.newest_whole(from_worst, act=False)
            if all(path.is_dir() for path in from_worst):
                break
        if whole is None:
            return self.named(self.folder, act=False)
        for path in unknown:
            condition = condition_of(path, contents=False)
            if condition.problems and path.is_dir():
                complaints.append(self._passed_over(path, condition, act=False))
        return whole, complaints

    def named(self, path: Path, check: Check = condition_of_checkpoint, *, act: bool = True) -> tuple[Path, list[str]]:
        """The checkpoint that a path means: itself, or the newest whole one of the folder or run it names.

        With it, a sentence about each newer one that is damaged.
        """
        if not path.is_dir():
            raise CheckpointError(f"there is no checkpoint {path}")
        if not _STEP.match(path.name):
            inner = path / "checkpoints" if (path / "checkpoints").is_dir() else path
            act = act and inner.resolve() == self.folder.resolve()  # another run's are that run's
            whole, complaints = CheckpointStore(inner).newest_whole(None, check, act=act)
            if whole is None:
                raise CheckpointError("\n".join([*complaints, f"there is no whole checkpoint in {inner}"]))
            return whole, complaints
        condition = check(path)
        if condition.newer:
            raise NewerCheckpoint.of(path, condition.newer)
        if condition.problems:
            what = "cannot be read" if condition.unreadable else "is damaged"
            raise CheckpointError(f"checkpoint {path} {what}: {'; '.join(condition.problems)}")
        return path, []

    def refuse_newer(self) -> None:
        """Raises if there is a checkpoint in place that a newer shardwise wrote."""
        for found in self.every():
            if found.newer:
                raise NewerCheckpoint.of(found.path, found.newer)

    def supersede_after(self, step: int) -> None:
        """A run that goes on from an earlier step makes the later ones anew: the old ones no longer count."""
        for found in self.every():
            if found.step > step and found.path not in self.passed_over:
                self._supersede(found.path)

    def supersede_all(self) -> None:
        """A run that begins: what lies here, damaged ones included, is of a run before it."""
        self.supersede_after(-1)
        for path in self.set_aside():
            self._supersede(path)

    def about_damaged(self) -> list[str]:
        """A sentence about each that was set aside."""
        return [
            f"checkpoint {path} is damaged, and was set aside: {'; '.join(problems_of(path, contents=False)) or 'its contents'}"
            for path in self.set_aside()
        ]

    def _supersede(self, path: Path) -> None:
        path.rename(self._free_name(f"{_SUPERSEDED}{path.name.removeprefix(_REPLACED)}"))

    def set_aside(self) -> list[Path]:
        """What is left of this run's checkpoints that were damaged."""
        return sorted(self.folder.glob(f"{_DAMAGED}*"))

    def leftovers(self) -> list[tuple[Path, str]]:
        """What lies in the folder and is no checkpoint, and why."""
        reasons = {
            ".writing-": "never finished",
            ".deleting-": "being deleted",
            _REPLACED: "replaced by a newer one of the same step",
            _DAMAGED: "damaged, set aside",
            _SUPERSEDED: "of a run that was not gone on with, set aside",
        }
        in_place = {found.path for found in self.every()}
        return [
            (path, reason)
            for path in sorted(self.folder.iterdir())
            for start, reason in reasons.items()
            if path.name.startswith(start) and path not in in_place
        ]

    def repair(self) -> list[str]:
        """Finish what an interrupted run left half done. Says what was done; nothing that could be used is deleted."""
        done = []
        for found in self.every():
            if found.path.name.startswith(_REPLACED) and not found.newer:
                found.path.rename(self.place(found.step))
                done.append(f"{self.place(found.step).name} was about to be replaced and is back in place")
        for path, reason in self.leftovers():
            if path.name.startswith((".writing-", ".deleting-", _REPLACED)) and not _newer(path):
                shutil.rmtree(path)
                done.append(f"{path.name} ({reason}) was removed")
        return done

    def retire(self, *, keep_best: int, mode: str, keep_last: int = 1) -> None:
        """Keep the newest and the best few; the rest goes. A folder is renamed before it is deleted."""
        every = [found for found in self.every() if not found.newer]  # of those, none is touched or counted
        kept = {found.path for found in every[-keep_last:]} | {
            found.path for found in self._by_metric(mode)[:keep_best]
        }
        for found in every:
            if found.path not in kept and found.readable:  # what cannot be read may be the best
                found.path.rename(self._free_name(f".deleting-{found.path.name}"))
        for doomed in self.folder.glob(".deleting-*"):  # an interrupted run may have left some
            shutil.rmtree(doomed)

    def _by_metric(self, mode: str) -> list[Found]:
        # A metric that is no number compares with nothing, so it cannot be the best.
        scored = [found for found in self.every() if found.metric is not None and not math.isnan(found.metric)]
        sign = 1 if mode == "min" else -1
        return sorted(scored, key=lambda found: (sign * (found.metric or 0.0), found.step))

    def _free_name(self, name: str) -> Path:
        candidates = (self.folder / (name if not number else f"{name}-{number}") for number in range(10_000))
        return next(path for path in candidates if not path.exists())


def _number(value: object) -> float | None:
    """None: it is none, or none that a metric can be."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def _newer(folder: Path) -> str:
    """Which version its manifest is of, where a newer shardwise wrote it."""
    try:
        read_manifest(folder)
    except NewerVersion as error:
        return str(error)
    except ValueError:
        pass
    return ""
