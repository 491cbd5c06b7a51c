"""What to type next: commands that can be pasted, as they are printed, into the shell that the program was started from."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from shardwise.config.secrets import without_secrets
from shardwise.config.yaml_reader import is_read_as_text

NAME = "shardwise"
RESUME, FRESH = "--resume", "--fresh"
SHORTEST = {RESUME: len("--res"), FRESH: len("--f")}
"""argparse takes the beginning of an option for it, where no other option begins so."""


@dataclass(frozen=True)
class ConfigSource:
    """Where a config was read from, to name it again."""

    file: str
    overrides: tuple[str, ...] = ()

    @property
    def words(self) -> list[str]:
        return [self.file, *overriding(*self.overrides)]


class HasLength(Protocol):
    """The part of a config that says how long a run is."""

    @property
    def max_epochs(self) -> int: ...
    @property
    def max_steps(self) -> int | None: ...


def command(*words: str | Path) -> str:
    """`shardwise`, with these words after it."""
    return shlex.join([*_shardwise(), *without_secrets([str(word) for word in words])])


def overriding(*changes: str) -> list[str]:
    return [word for change in changes for word in ("--set", change)]


def yaml_text(text: str) -> str:
    """As a value of YAML: quoted where it would be read as something else, or would end before its end."""
    plain = re.fullmatch(r"[\w./-]+", text) is not None and is_read_as_text(text)  # not: no, 12, null
    return text if plain else json.dumps(text, ensure_ascii=False)


def twice_as_long(training: HasLength) -> list[str]:
    """The words that make a run twice as long as this one was to be."""
    changes = [f"training.max_epochs={2 * training.max_epochs}"]
    if training.max_steps is not None:
        changes.append(f"training.max_steps={2 * training.max_steps}")
    return overriding(*changes)


def is_shardwise() -> bool:
    """This program is `shardwise` itself, and not a user's own."""
    program = Path(sys.argv[0])
    return program.name == NAME or (program.name == "__main__.py" and program.parent.name == NAME)


def to_start_anew(checkpoints: Path) -> str:
    """A sentence. A program of the user's own has no --fresh: it goes on from what lies in its folder of checkpoints."""
    if is_shardwise() and sys.argv[1:2] == ["train"] and not takes_machines():
        return f"To start anew and keep the earlier run beside:  {user_command(FRESH)}"
    return f"To start anew, move {checkpoints} aside"


def takes_machines() -> bool:
    """The user has given --nodes, with which --resume is always meant and --fresh is not taken."""
    return is_shardwise() and any(word.partition("=")[0] == "--nodes" for word in sys.argv[1:])


def user_command(*more: str) -> str:
    """The command by which this program was started, with `more` after it. Which run it goes on with is left out."""
    words, under = without_secrets(sys.argv[1:]), _launched_by()
    by_torchrun = under[:1] == ["torchrun"]  # it takes a file, or -m and a module
    if is_shardwise():
        program, words = ["-m", NAME] if by_torchrun else _shardwise(), _without_its_run(words)
    else:
        program = _own_program() if by_torchrun else [_python(), *_own_program()]
    return shlex.join([*under, *program, *words, *more])


def _without_its_run(words: Sequence[str]) -> list[str]:
    kept, is_value = list[str](), False
    for word in words:
        name, equals, _ = word.partition("=")
        if is_value or _is(name, FRESH):
            is_value = False
        elif _is(name, RESUME):
            is_value = not equals
        else:
            kept.append(word)
    return kept


def _is(name: str, option: str) -> bool:
    return len(name) >= SHORTEST[option] and option.startswith(name)


def _launched_by() -> list[str]:
    """What the user wrote before the program, as far as it can be known. Ranks of our own launcher are the program's."""
    environ = os.environ
    if "RANK" not in environ or multiprocessing.parent_process() is not None:
        return []
    if "TORCHELASTIC_RUN_ID" in environ:
        words = ["torchrun", "--nproc-per-node", environ.get("LOCAL_WORLD_SIZE", "1")]
        machines = environ.get("GROUP_WORLD_SIZE", "1")
        if machines != "1":  # on every one of them
            where = f"{environ.get('MASTER_ADDR', 'HOST')}:29400"
            words += ["--nnodes", machines, "--rdzv-backend", "c10d", "--rdzv-endpoint", where]
        return words
    return ["srun"] if "SLURM_STEP_ID" in environ else []


def _shardwise() -> list[str]:
    """By its name, where the shell finds this very program by it."""
    own, found = Path(sys.argv[0]), shutil.which(NAME)
    if not is_shardwise() or own.name != NAME:
        beside = Path(sys.executable).parent / NAME
        return [NAME] if found is not None and Path(found) == beside else [_python(), "-m", NAME]
    if str(own) == NAME or (found is not None and Path(found).resolve() == own.resolve()):
        return [NAME]
    return [str(own)]


def _python() -> str:
    """By its name, where the shell finds this very interpreter by it. Links are not followed: they tell environments apart."""
    names = ("python", "python3")
    return next((name for name in names if shutil.which(name) == sys.executable), sys.executable)


def _own_program() -> list[str]:
    """The user's own: a file, or a module that was started by `python -m`."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None:
        return ["-m", spec.name.removesuffix(".__main__")]
    return [os.path.relpath(sys.argv[0])]
