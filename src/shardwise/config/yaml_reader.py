"""What of YAML is read: numbers as people write them, and nothing that grows. Refused as it is met, with its line."""

from __future__ import annotations

import re
from typing import Any

import yaml

MOST_BYTES = 2**20
"""Of a config."""
MOST_LEVELS = 40
"""Of blocks and lists in each other."""
MOST_VALUES = 20_000
"""In all, keys among them: PyYAML takes half a second for them."""
MOST_REPEATED = 10_000
"""Values that aliases repeat, in all: aliases of aliases may stand for billions."""
MOST_DIGITS = 300

_TAG = "tag:yaml.org,2002:"
INT, BOOL, DATE, TEXT = _TAG + "int", _TAG + "bool", _TAG + "timestamp", _TAG + "str"
_NOT_FOR_A_CONFIG = {_TAG + kind for kind in ("binary", "omap", "pairs", "set", "timestamp")}
_OF_NO_USE = re.compile("[\0\ud800-\udfff]")
"""Characters that no file name and no terminal takes."""


class Refused(yaml.MarkedYAMLError):
    """It is YAML, and not taken all the same. The problem says why, and what to write instead."""


class Reader(yaml.SafeLoader):
    """YAML 1.1 reads 1e-4 as text, because it has no dot, 010 as 8 and 1:30 as 90. Nobody means that."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._level = self._values = self._repeated = 0
        self._values_in: dict[int, int] = {}
        """By node, for each that is complete: how many values it stands for, aliases written out."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event, before = self.peek_event(), self._values
        self._level += 1
        if self._level > MOST_LEVELS:
            raise _refused(event, f"blocks and lists are nested more than {MOST_LEVELS} deep")
        node = super().compose_node(parent, index)
        self._level -= 1
        if isinstance(event, yaml.AliasEvent):
            self._repeat(event, node)
            return node
        self._values += 1
        self._values_in[id(node)] = self._values - before
        if self._values - self._repeated > MOST_VALUES:
            raise _refused(event, f"here are more than {MOST_VALUES} values, which is no config")
        if isinstance(node, yaml.ScalarNode) and isinstance(event, yaml.ScalarEvent):
            _check_scalar(event, node)
        if getattr(event, "tag", None) in _NOT_FOR_A_CONFIG:
            raise _refused(event, f"!!{event.tag.removeprefix(_TAG)} is nothing that a config has")
        return node

    def _repeat(self, event: yaml.AliasEvent, node: yaml.Node | None) -> None:
        if id(node) not in self._values_in:
            raise _refused(event, "an anchor contains itself")
        again = self._values_in[id(node)]
        self._values += again
        self._repeated += again
        if self._repeated > MOST_REPEATED:
            raise _refused(
                event,
                f"with *{event.anchor:.40}, aliases repeat more than {MOST_REPEATED} values. Write out what is meant",
            )


def _refused(event: yaml.Event, problem: str) -> Refused:
    return Refused(problem=problem, problem_mark=event.start_mark)  # type: ignore[arg-type]


# ---------------------------------------------------------------- numbers

_BASE_8 = re.compile(r"[-+]?0[0-9_]+")
_NEW_BASE_8 = re.compile(r"[-+]?0o_*[0-7][0-7_]*")
_BASE_60 = re.compile(r"[-+]?[1-9][0-9_]*(:[0-5]?[0-9])+")
_UNDERSCORES = re.compile(r"[-+]?[1-9][0-9_]*_[0-9_]*")
_THOUSANDS = re.compile(r"[-+]?[0-9]{1,3}(_[0-9]{3})+")
_READ_OTHERWISE = {
    _BASE_8: "begins with 0, as numbers in base 8 do",
    _NEW_BASE_8: "is written in base 8",
    _BASE_60: "would be read in base 60",
    _UNDERSCORES: "has _ where no thousands begin",
}


def _check_scalar(event: yaml.ScalarEvent, node: yaml.ScalarNode) -> None:
    if _OF_NO_USE.search(node.value):
        raise _refused(event, "a text has a character that cannot be used: a zero byte, or half of a pair")
    if event.implicit[0] or node.tag == INT:
        problem = misread(node.value, is_number=node.tag == INT)
        if problem is not None:
            raise _refused(event, problem)


def misread(value: str, *, is_number: bool = True) -> str | None:
    """What is wrong with a number that means one thing to people and another to YAML; None: nothing is."""
    if len(value) > MOST_DIGITS:
        return f"{value[:20]}… is a number of {len(value)} digits" if is_number else None
    number = _meant(value)
    if number is None:
        return None
    why = next(why for pattern, why in _READ_OTHERWISE.items() if pattern.fullmatch(value))
    return f'{value:.40} {why}: write {number:.40} for the number, or "{value:.40}" in quotes for a text'


def _meant(value: str) -> str | None:
    """The number in base 10 that a person will have meant; None: it is written so already, or none."""
    sign, digits = "-" if value.startswith("-") else "", value.lstrip("+-").replace("_", "")
    if _NEW_BASE_8.fullmatch(value):
        return f"{sign}{int(digits[2:], 8)}"
    if _BASE_60.fullmatch(value):
        number = 0
        for digit in digits.split(":"):
            number = 60 * number + int(digit)
        return f"{sign}{number}"
    if _BASE_8.fullmatch(value) or (_UNDERSCORES.fullmatch(value) and not _THOUSANDS.fullmatch(value)):
        return sign + (digits.lstrip("0") or "0")
    return None


Reader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:float"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
Reader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*\.[\d_]*([eE][-+]?\d+)?|\d[\d_]*[eE][-+]?\d+|\.\d+([eE][-+]?\d+)?|\.inf|\.nan)$"),
    list("-+0123456789."),
)
# 08 and 0o10 are text to YAML 1.1. That they are numbers is said so that they are written in quotes where text is meant.
for _pattern in (_BASE_8, _NEW_BASE_8):
    Reader.add_implicit_resolver(INT, re.compile(rf"^{_pattern.pattern}$"), list("-+0"))


class Writer(yaml.SafeDumper):
    """Writes what Reader reads as the same."""


Writer.yaml_implicit_resolvers = Reader.yaml_implicit_resolvers


def is_read_as_text(text: str) -> bool:
    """Whether it is text without quotes."""
    return Reader("").resolve(yaml.ScalarNode, text, (True, False)) == TEXT


def write_yaml(values: Any) -> str:
    return yaml.dump(values, Dumper=Writer, sort_keys=False, allow_unicode=True)
