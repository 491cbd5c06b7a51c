"""YAML as people write it (1e-4 is a number, a key twice is an error), with the line of every key."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from shardwise.errors import ConfigError

KeyPath = tuple[str | int, ...]


@dataclass
class Document:
    values: Any
    lines: dict[tuple[str, ...], int] = field(default_factory=dict)

    def line_of(self, path: KeyPath) -> int | None:
        """The line of the key, or of the nearest block around it."""
        parts = tuple(str(part) for part in path)
        while parts and parts not in self.lines:
            parts = parts[:-1]
        return self.lines.get(parts)


def read_yaml(text: str, where: str) -> Document:
    document = Document(values={})
    try:
        root = yaml.compose(text, Loader=_Loader)
        if root is not None:
            _collect_lines(root, (), document.lines, where)
            document.values = _Loader("").construct_document(root)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{where}, line {line}: not valid YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that no calendar has
        raise ConfigError(f"{where}: not valid YAML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{where}: not valid YAML: an anchor contains itself") from None
    return document


def read_value(text: str, where: str) -> Any:
    """The value of an override: what the same characters would mean in the file."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        raise ConfigError(f"{where}: the value is not valid YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{where}: the value is not valid YAML: {error}") from None


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads 1e-4 as text, because it has no dot. Nobody means that."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:float"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*\.[\d_]*([eE][-+]?\d+)?|\d[\d_]*[eE][-+]?\d+|\.\d+([eE][-+]?\d+)?|\.inf|\.nan)$"),
    list("-+0123456789."),
)


def _collect_lines(node: yaml.Node, path: tuple[str, ...], lines: dict[tuple[str, ...], int], where: str) -> None:
    if isinstance(node, yaml.MappingNode):
        for key_node, value_node in node.value:
            key = (*path, str(key_node.value))
            line = key_node.start_mark.line + 1
            if key in lines:
                raise ConfigError(
                    f"{where}, line {line}: {'.'.join(key)} is given twice; the first is on line {lines[key]}"
                )
            lines[key] = line
            _collect_lines(value_node, key, lines, where)
    elif isinstance(node, yaml.SequenceNode):
        for index, child in enumerate(node.value):
            lines[(*path, str(index))] = child.start_mark.line + 1
            _collect_lines(child, (*path, str(index)), lines, where)
