"""From a file and its overrides to a checked Config."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, create_model

from shardwise.config.commands import ConfigSource
from shardwise.config.explain import explain
from shardwise.config.hub import use_fetched
from shardwise.config.registry import BUILT_IN, known, load, lookup, nearest
from shardwise.config.schema import Block, Config, DataBlock, Training
from shardwise.config.yaml_lines import Document, read_file, read_value, read_yaml
from shardwise.errors import ConfigError

OWN = "own"
"""The task of a config whose model, data and loss a program hands to Session.prepare."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file, apply `a.b=c` overrides, and check every key."""
    file = Path(path).expanduser()
    if not file.is_file():
        near = sorted(str(other) for other in file.parent.glob("*.y*ml")) if file.parent.is_dir() else []
        hint = f" In that folder: {', '.join(near[:5])}." if near else ""
        raise ConfigError(f"there is no config file {file}.{hint}")
    config = parse_config(read_file(file), overrides, where=str(file), name=file.stem, beside=file.resolve().parent)
    return config.read_from(ConfigSource(str(file), tuple(overrides)))


def parse_config(
    text: str,
    overrides: Sequence[str] = (),
    *,
    where: str = "config",
    name: str = "run",
    beside: Path | None = None,
) -> Config:
    """`beside`: the folder of the file, where a task of the user's own usually is a module."""
    document = read_yaml(text, where)
    if not isinstance(document.values, dict):
        raise ConfigError(f"{where}: a config is a mapping of keys to values, for example 'task: chess'")
    for override in overrides:
        _apply_override(document, override)
    document.values.setdefault("name", name)
    if "task" not in document.values:
        raise ConfigError(f"{where}: the key 'task' is missing. What should be trained? For example: task: chess")
    if beside is not None and ":" in str(document.values["task"]):
        for folder in (str(Path.cwd()), str(beside)):
            if folder not in sys.path:
                sys.path.append(folder)  # last, or a chess.py beside chess.yaml would hide the package
    return _checked(document, where)


def config_values(config: Config) -> dict[str, Any]:
    """What the file and its overrides say, as plain values. They can be sent to another process; a Config cannot, because
    its class is made for its task."""
    return config.model_dump(exclude_unset=True)


def config_from_values(values: Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """The config whose `config_values` these are. No file is read."""
    document = Document(copy.deepcopy(dict(values)))
    for override in overrides:
        _apply_override(document, override)
    return _checked(document, "config")


def config_class(
    task: Any, where: str = "config", strategy_block: tuple[str, type[Block]] | None = None
) -> type[Config]:
    """The schema for a task. Of a task that comes with shardwise, only its config is imported. `strategy_block`: the settings
    of a strategy that schema.py does not know, and their key under `training`."""
    fields: dict[str, Any] = {}
    if strategy_block is not None:
        name, block = strategy_block
        option: Any = (block | None, Field(None, description=f"Settings of strategy {name}."))
        described = Config.model_fields["training"].description
        fields["training"] = (
            create_model("Training", __base__=Training, **{name: option}),
            Field(description=described),
        )
    if task == OWN:
        return create_model("Config", __base__=Config, **fields) if fields else Config
    built_in = str(task) in BUILT_IN["shardwise.tasks"]
    blocks = built_in_blocks(str(task)) if built_in else task_blocks(load_task_class(task, where))
    for key, model in blocks.items():
        # An empty block as the default, checked like one in the file: the block may have keys that are needed.
        fields[key] = (model, Field(default_factory=dict, description=Config.model_fields[key].description))
    return create_model("Config", __base__=Config, **fields)


def _strategy_block(training: Any) -> tuple[str, type[Block]] | None:
    """Only where the file has a block of the strategy that it names, and nobody else knows it, is the strategy imported."""
    name = training.get("strategy") if isinstance(training, dict) else None
    if not isinstance(name, str) or name not in training or name in Training.model_fields:
        return None
    block = _block_of(name)
    return None if block is None else (name, block)


def strategy_blocks() -> dict[str, type[Block]]:
    """Of the strategies that come with shardwise, those that schema.py does not know. Imports all of them, and torch."""
    found = {name: _block_of(name) for name in BUILT_IN["shardwise.strategies"]}
    return {name: block for name, block in found.items() if block is not None}


def _block_of(strategy: str) -> type[Block] | None:
    entry = lookup("shardwise.strategies", strategy)
    return None if entry is None else getattr(load(entry), "block", None)


def make_task(config: Config) -> Any:
    """The task of a config, ready to be asked for its data and its model."""
    return load_task_class(config.task)(use_fetched(config))


def load_task_class(task: Any, where: str = "config") -> Any:
    """The class behind `task: chess`, the name of an installed package's task, or `task: mypackage.tasks:MyTask`."""
    if task == OWN:
        raise ConfigError(f"{where}: task: own is for a loop of your own: give session.prepare() model, data and loss")
    if ":" in str(task):
        return _import_task_class(task, where)
    entry = lookup("shardwise.tasks", str(task))
    if entry is None:
        raise _unknown_task(task, where)
    task_class = load(entry)
    if not isinstance(task_class, type):
        raise ConfigError(f"{where}: task: {task} stands for {entry.value}, which is not a class")
    return task_class


def _import_task_class(task: Any, where: str) -> type:
    module_name, _, class_name = str(task).partition(":")
    if not class_name or not all(part.isidentifier() for part in module_name.split(".")):
        raise _unknown_task(task, where)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, but something it imports is not: its own traceback says more
        raise ConfigError(
            f"{where}: task: {task}: there is no module {module_name!r}. It must be installed, or lie in this folder "
            "or beside the config file"
        ) from None
    task_class = getattr(module, class_name, None)
    if not isinstance(task_class, type):
        names = [name for name, value in vars(module).items() if isinstance(value, type) and not name.startswith("_")]
        raise ConfigError(
            f"{where}: task: {task}: {module_name} has no class {class_name!r}. It has: {', '.join(names) or 'none'}"
        )
    _refuse_hidden_methods(task_class, f"{where}: task: {task}")
    return task_class


def _refuse_hidden_methods(task_class: type, where: str) -> None:
    """`labels = 6` in a task would be called where a method is expected."""
    base = next((kind for kind in task_class.__mro__ if kind.__module__ == "shardwise.tasks.base"), None)
    for name, method in vars(base).items() if base else ():
        value = getattr(task_class, name)
        if not name.startswith("_") and callable(method) and not callable(value):
            raise ConfigError(
                f"{where}: {task_class.__name__}.{name} is {value!r:.60}, but {name}() is a method of every task, which "
                "shardwise calls. Give the attribute another name"
            )


def _unknown_task(task: Any, where: str) -> ConfigError:
    names = known("shardwise.tasks")
    near = nearest(task, names)
    return ConfigError(
        f"{where}: task: {task!r} is neither a known task ({', '.join(names)}) nor an import path."
        f"{f' Nearest: {near}.' if near else ''} Your own is written as module:Class, for example mypackage.tasks:MyTask"
    )


def built_in_blocks(task: str) -> dict[str, type[Block]]:
    """The models of a built-in task's blocks, from the config beside it: neither torch nor the task is imported for them."""
    folder, _, _ = BUILT_IN["shardwise.tasks"][task].partition(".task:")
    blocks: dict[str, type[Block]] = importlib.import_module(f"{folder}.config").BLOCKS
    return blocks


def task_blocks(task_class: Any) -> dict[str, type[Block]]:
    """The models of the blocks that a task of the user's own declares: Data, Tokenizer, Model."""
    blocks = {
        "data": getattr(task_class, "Data", DataBlock),
        "tokenizer": getattr(task_class, "Tokenizer", Block),
        "model": getattr(task_class, "Model", Block),
    }
    for key, model in blocks.items():
        base = DataBlock if key == "data" else Block
        if not (isinstance(model, type) and issubclass(model, base)):
            raise ConfigError(
                f"{task_class.__name__}.{key.capitalize()} must be a subclass of shardwise.{base.__name__}"
            )
    return blocks


def _checked(document: Document, where: str) -> Config:
    schema = config_class(document.values["task"], where, _strategy_block(document.values.get("training")))
    try:
        return schema.model_validate(document.values)
    except ValidationError as error:
        raise ConfigError(explain(error, schema, document, where)) from None


def _apply_override(document: Document, override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {override}: write key=value, for example --set training.batch_size=8")
    *parents, last = key.strip().split(".")
    place = document.values
    for depth, name in enumerate(parents, start=1):
        if place.get(name) is None:
            place[name] = {}
            document.lines.setdefault(tuple(parents[:depth]), 0)
        place = place[name]
        if not isinstance(place, dict):
            raise ConfigError(f"--set {override}: {name!r} is a value, not a block: it has no keys below it")
    new = read_value(value, f"--set {override}")
    place[last] = new.values
    document.replace((*parents, last), new)
