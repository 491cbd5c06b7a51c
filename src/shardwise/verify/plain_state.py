"""State in plain attributes: of the model's modules, of the task, and in the variables of the file that the task is written in.

Checkpoints do not carry it, ranks do not share it. So it is looked at before and after a forward pass, an evaluation.
"""

from __future__ import annotations

import copy
import hashlib
import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Set
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shardwise.compat.modules import plain_attributes

MOST_ITEMS = 5_000
"""Of one list or dict; a longer one is data."""
MOST_BYTES = 64 * 2**20
"""Of one tensor or array."""
DEEPEST = 3
_OF_TASKS = {"config", "_model"}
_LIBRARIES = {"torch", "shardwise", "transformers", "monai", "builtins"}
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


class PlainState:
    """What is there now, of the task and its file. Kept, so that it can be put back."""

    def __init__(self, task: Any, classes: Iterable[type] = ()) -> None:
        """`classes`: of modules, whose files count too."""
        self.task, self.classes = task, list(classes)
        self._digests: dict[str, str] = {}
        self._kept: dict[str, tuple[Any, str, Any]] = {}
        for place, holder, key in _of_task(task, self.classes):
            value = _get(holder, key)
            if (digest := _digest(value, DEEPEST)) is not None:
                self._digests[place] = digest
                self._kept[place] = holder, key, _copied(value)

    def changed(self) -> list[str]:
        """Places that have another value now, or are new, by name."""
        now = {place: _digest(_get(holder, key), DEEPEST) for place, holder, key in _of_task(self.task, self.classes)}
        return [place for place, digest in now.items() if digest is not None and self._digests.get(place) != digest]

    def put_back(self) -> None:
        for place, (holder, key, value) in self._kept.items():
            if _digest(_get(holder, key), DEEPEST) != self._digests[place]:
                _set(holder, key, _copied(value))
        for place, holder, key in list(_of_task(self.task, self.classes)):
            if place not in self._digests and _digest(_get(holder, key), DEEPEST) is not None:
                _delete(holder, key)


def attributes_of(model: nn.Module) -> dict[str, str]:
    """Fingerprints of the plain attributes of its modules, by name."""
    found = {}
    for name, module in model.named_modules():
        if type(module).__module__.startswith("torch.nn.parallel"):
            continue
        for key, value in plain_attributes(module).items():
            if (digest := _digest(value, DEEPEST)) is not None:
                found[f"{name}.{key}" if name else key] = digest
    return found


def settings_of(model: nn.Module) -> dict[str, str]:
    """What is set on parameters and modules, by name: frozen or not, training or evaluating."""
    found = {f"{name}.requires_grad": str(each.requires_grad) for name, each in model.named_parameters()}
    return found | {f"{name or 'the model'}.training": str(each.training) for name, each in model.named_modules()}


def _of_task(task: Any, classes: Iterable[type]) -> Iterator[tuple[str, Any, str]]:
    """(its name, where it lies, its key): attributes of the task and of the classes, and variables of the files in which they and
    the task's functions are written."""
    yield from ((f"the task's {key}", task, key) for key in list(getattr(task, "__dict__", ())) if key not in _OF_TASKS)
    mine = [each for each in (type(task), *classes) if each.__module__.partition(".")[0] not in _LIBRARIES]
    for kind in dict.fromkeys(mine):
        yield from ((f"{kind.__name__}.{key}", kind, key) for key in list(vars(kind)) if not key.startswith("_"))
    files = {id(each.__globals__): each.__globals__ for each in vars(task).values() if isinstance(each, FunctionType)}
    modules = [sys.modules.get(kind.__module__) for kind in mine]
    files |= {id(vars(each)): vars(each) for each in modules if isinstance(each, ModuleType)}
    for variables in files.values():
        yield from ((f"the variable {key}", variables, key) for key in list(variables) if not key.startswith("__"))


def _get(holder: Any, key: str) -> Any:
    return holder[key] if isinstance(holder, dict) else vars(holder).get(key)


def _set(holder: Any, key: str, value: Any) -> None:
    if isinstance(holder, dict):
        holder[key] = value
    else:
        setattr(holder, key, value)


def _delete(holder: Any, key: str) -> None:
    if isinstance(holder, dict):
        del holder[key]
    else:
        delattr(holder, key)


def _digest(value: Any, depth: int) -> str | None:
    """None: it is no plain value, and is not looked at."""
    if isinstance(value, nn.Parameter | ModuleType | type | FunctionType):
        return None
    if isinstance(value, _PLAIN):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, Tensor):
        if value.is_meta or value.numel() * value.element_size() > MOST_BYTES:
            return None
        return _hash(value.detach().cpu().contiguous().clone().reshape(-1).view(torch.uint8).numpy().tobytes())
    if isinstance(value, nn.Module):  # beside the model: a teacher
        tensors = [each.data for each in (*value.parameters(), *value.buffers())]
        few = sum(each.nbytes for each in tensors) <= MOST_BYTES and not any(each.is_meta for each in tensors)
        return _hash(repr([_digest(each, 0) for each in tensors]).encode()) if few and tensors else None
    if isinstance(value, np.ndarray | np.generic):
        small = value.nbytes <= MOST_BYTES and value.dtype != object
        return _hash(np.ascontiguousarray(value).tobytes()) if small else None
    if isinstance(value, torch.Generator):
        return _hash(value.get_state().numpy().tobytes())
    if isinstance(value, random.Random):
        return _hash(repr(value.getstate()).encode())
    if isinstance(value, np.random.Generator):
        return _hash(repr(value.bit_generator.state).encode())
    return _digest_of_items(value, depth) if depth else None


def _digest_of_items(value: Any, depth: int) -> str | None:
    if isinstance(value, Mapping):
        items = list(value.items()) if len(value) <= MOST_ITEMS else None
    elif isinstance(value, Set):
        items = list(enumerate(sorted(value, key=repr))) if len(value) <= MOST_ITEMS else None
    elif isinstance(value, list | tuple) or (hasattr(value, "append") and hasattr(value, "__len__")):  # a deque, too
        items = list(enumerate(value)) if len(value) <= MOST_ITEMS else None
    else:
        return None
    if items is None:
        return None
    parts = [(str(key), _digest(item, depth - 1)) for key, item in items]
    return _hash(repr([type(value).__name__, *parts]).encode())


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.clone_state()
    if isinstance(value, Tensor):
        return value.detach().clone() if value.grad_fn is not None else value.clone()
    try:
        return copy.deepcopy(value)
    except Exception:  # a tensor with a history, somewhere inside
        return value
