"""What this process is about to run, so that the members of a run can compare: config, sources, versions, devices."""

from __future__ import annotations

import hashlib
import platform
import sys
import sysconfig
from functools import cache
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import shardwise
from shardwise.config import Config
from shardwise.config.by_key import by_dotted_key
from shardwise.config.secrets import is_secret
from shardwise.parallel.membership import About

_OURS = Path(shardwise.__file__).parent
_INSTALLED = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})


MACHINES_OWN = frozenset({"training.num_gpus"})
"""Keys that each of the machines that come and go sets for itself: what it brings."""


def what_runs(config: Config, device: str | None = None, own: frozenset[str] = frozenset()) -> About:
    """`own`: keys of the config that may differ."""
    return {
        "config": {
            name: _told(name, value)
            for name, value in by_dotted_key(config.model_dump(mode="json")).items()
            if name not in own
        },
        "sources": _sources(),
        "versions": _versions(),
        "devices": {} if device is None else {"device": device},
    }


def _told(name: str, value: Any) -> Any:
    if value is None or not is_secret(name.rpartition(".")[2]):
        return value
    return {"hidden": _digest(repr(value).encode())}


def _sources() -> dict[str, str]:
    """The contents of the modules that are neither Python's nor installed: the task's, and what it imports. shardwise itself
    counts as one."""
    found = {"shardwise's own sources": _of_shardwise()}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not isinstance(module, ModuleType) or not isinstance(file, str) or not file.endswith(".py"):
            continue
        if not Path(file).is_absolute():  # what PyTorch calls modules
            continue
        if file.startswith((*_INSTALLED, str(_OURS))) or "-packages/" in file:
            continue
        try:
            found[f"the source of {_called(name, file)}"] = _digest(Path(file).read_bytes())
        except OSError:  # it was there when it was imported
            found[f"the source of {_called(name, file)}"] = "gone"
    return found


def _called(name: str, file: str) -> str:
    return Path(file).name if name in ("__main__", "__mp_main__") else name


@cache
def _of_shardwise() -> str:
    whole = hashlib.sha256()
    for file in sorted(_OURS.rglob("*.py")):
        whole.update(f"{file.relative_to(_OURS)}\0".encode() + file.read_bytes())
    return whole.hexdigest()


def _versions() -> dict[str, str]:
    """Of Python, of what shardwise needs, and of every package that has been loaded and says which it is."""
    found = {"Python": platform.python_version(), **_installed()}
    for name, module in list(sys.modules.items()):
        version = vars(module).get("__version__") if isinstance(module, ModuleType) and "." not in name else None
        if isinstance(version, str):
            found[name] = version
    return {f"the version of {name}": version for name, version in found.items() if not name.startswith("_")}


@cache
def _installed() -> dict[str, str]:
    found = {"torch": str(torch.__version__)}
    for need in _needs():
        try:
            found[need] = metadata.version(need)
        except metadata.PackageNotFoundError:
            continue
    return found


def _needs() -> list[str]:
    """shardwise's own requirements, its extras included; none where it is not installed but on the path."""
    try:
        return [each.split(">")[0].split("[")[0].split(";")[0].strip() for each in metadata.requires("shardwise") or ()]
    except metadata.PackageNotFoundError:
        return []


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
