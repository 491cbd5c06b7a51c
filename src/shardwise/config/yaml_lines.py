"""YAML as people write it (1e-4 is a number, a key twice is an error), with the line of every key."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from shardwise.config.plain_files import NotPlain, open_plain
from shardwise.config.yaml_reader import BOOL, DATE, MOST_BYTES, Reader, Refused
from shardwise.errors import ConfigError

KeyPath = tuple[str | int, ...]


@dataclass
class Document:
    values: Any
    lines: dict[tuple[str, ...], int] = field(default_factory=dict)
    written: dict[tuple[str, ...], str] = field(default_factory=dict)
    """How a value is written that YAML 1.1 reads as another one: yes, no, on, off, and dates."""

    def line_of(self, path: KeyPath) -> int | None:
        """The line of the key, or of the nearest block around it."""
        parts = tuple(str(part) for part in path)
        while parts and parts not in self.lines:
            parts = parts[:-1]
        return self.lines.get(parts)

    def written_at(self, path: KeyPath) -> str | None:
        return self.written.get(tuple(str(part) for part in path))

    def replace(self, key: tuple[str, ...], new: Document) -> None:
        """The lines of the file no longer say where the value at a key, or anything in it, came from."""
        depth = len(key)
        self.lines = {path: line for path, line in self.lines.items() if path[:depth] != key} | {key: 0}
        self.written = {path: text for path, text in self.written.items() if path[:depth] != key}
        self.written |= {(*key, *path): text for path, text in new.written.items()}


def read_file(file: Path) -> str:
    """The text of a file that the user names: it may be a link, and no larger than a config is."""
    try:
        with open_plain(file, follow=True) as stream:
            data = stream.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise ConfigError(f"{file} is larger than {MOST_BYTES} bytes: it is no config")
        return data.decode()
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{file} is not a text file") from None
    except NotPlain as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None


def read_yaml(text: str, where: str) -> Document:
    return _read(text, where, "not valid YAML", lines=True)


def read_value(text: str, where: str) -> Document:
    """The value of an override: what the same characters would mean in the file."""
    return _read(text, where, "the value is not valid YAML", lines=False)


def _read(text: str, where: str, complaint: str, *, lines: bool) -> Document:
    """`lines`: whether it is a file, whose lines help."""
    document = Document(values={} if lines else None)
    if len(text) > MOST_BYTES:
        raise ConfigError(f"{where}: more than {MOST_BYTES} characters are no config")
    try:
        root = yaml.compose(text, Loader=Reader)
        if root is not None:
            _collect(root, (), document)
            document.values = Reader("").construct_document(root)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1 if error.problem_mark else 1}" if lines else ""
        known = "" if isinstance(error, Refused) else f"{complaint}: "
        raise ConfigError(f"{where}{line}: {known}{error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that no calendar has
        raise ConfigError(f"{where}: {complaint}: {error}") from None
    return document


def _collect(node: yaml.Node, path: tuple[str, ...], document: Document) -> None:
    if isinstance(node, yaml.MappingNode):
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                continue  # refused when it is constructed
            key = (*path, str(key_node.value))
            if key in document.lines:
                problem = f"{'.'.join(key)} is given twice; the first is on line {document.lines[key]}"
                raise Refused(problem=problem, problem_mark=key_node.start_mark)
            document.lines[key] = key_node.start_mark.line + 1
            _collect(value_node, key, document)
    elif isinstance(node, yaml.SequenceNode):
        for index, child in enumerate(node.value):
            document.lines[(*path, str(index))] = child.start_mark.line + 1
            _collect(child, (*path, str(index)), document)
    elif isinstance(node, yaml.ScalarNode) and (
        node.tag == DATE or (node.tag == BOOL and node.value.lower() not in ("true", "false"))
    ):
        document.written[path] = node.value
