"""Pydantic's errors, said for a person: file, line, key, the value given, what is allowed, the nearest right key."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from shardwise.config.yaml_lines import Document, KeyPath

MOST_DETAILS = 20
"""Of an error: a list that should be a number has a mistake in each of its values."""


def explain(error: ValidationError, schema: type[BaseModel], document: Document, where: str) -> str:
    # A union reports a mistake once per member: they become one message with what each of them allows.
    allowed: dict[tuple[int, str], list[str]] = {}
    for detail in error.errors()[:MOST_DETAILS]:
        path = _real_keys(detail["loc"], document.values)
        message = f"{_place(document, path, where)}: {_describe(detail, path, schema, document.written_at(path))}"
        what, _, choices = message.partition(_ALLOWED)
        options = allowed.setdefault((document.line_of(path) or 0, what), [])
        if choices and choices not in options:
            options.append(choices)
    lines = sorted(allowed, key=lambda key: key[0])
    more = error.error_count() - MOST_DETAILS
    return "\n".join(
        [what + (_ALLOWED + ", or ".join(allowed[line, what]) if allowed[line, what] else "") for line, what in lines]
        + ([f"{where}: and {more} more"] if more > 0 else [])
    )


_ALLOWED = "Allowed: "


def _place(document: Document, path: KeyPath, where: str) -> str:
    line = document.line_of(path)
    if line == 0:
        return "--set"
    return f"{where}, line {line}" if line else where


def _describe(detail: ErrorDetails, path: KeyPath, schema: type[BaseModel], written: str | None) -> str:
    """`written`: what stands there, where YAML reads it as something else."""
    key, value, kind, ctx = _dotted(path), detail["input"], detail["type"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        return f"{key} is not a key that shardwise knows (value {_short(value)}).{_nearest(path, schema)}"
    if kind == "missing":
        return f"{key} is missing"
    if kind == "invalid_key":
        return f"{key}: a key must be text; put it in quotes"
    if kind == "value_error":
        return f"{key + ': ' if key else ''}{ctx['error']}"
    if written is not None:
        read = str(value).lower() if isinstance(value, bool) else "a date"
        shown = f"{written}, which YAML reads as {read} (in quotes it is a text),"
    else:
        shown = _short(value)
    return f"{key}: {shown} is not allowed. {_allowed(kind, ctx, detail['msg'])}"


def _allowed(kind: str, ctx: dict[str, Any], message: str) -> str:
    bounds = {
        "greater_than": "above {gt}",
        "greater_than_equal": "{ge} or more",
        "less_than": "below {lt}",
        "less_than_equal": "{le} or less",
        "string_too_short": "text of {min_length} character(s) or more",
        "finite_number": "a finite number",
    }
    if kind in bounds:
        return f"Allowed: {bounds[kind].format(**ctx)}"
    if kind == "literal_error":
        return f"Allowed: {ctx['expected'].replace(chr(39), '').replace(' or ', ', ').replace('False', 'false')}"
    types_ = {
        "int": "a whole number",
        "float": "a number",
        "bool": "true or false",
        "string": "text",
        "list": "a list",
        "dict": "a block of keys",
        "model": "a block of keys",
    }
    name = kind.partition("_")[0]
    return f"Allowed: {types_[name]}" if name in types_ else message


def _nearest(path: KeyPath, schema: type[BaseModel]) -> str:
    """The same name in another block; else the name that looks most alike, in this block or in another."""
    *parents, last = [str(part) for part in path]
    every_key = list(_keys(schema))
    siblings = [key for key in every_key if key[:-1] == tuple(parents)]
    candidates = [key for key in every_key if key[-1] == last]
    for keys, cutoff in ((siblings, 0.6), (every_key, 0.75)):
        if not candidates:
            names = difflib.get_close_matches(last, [key[-1] for key in keys], n=1, cutoff=cutoff)
            candidates = [key for key in keys if key[-1] in names]
    if candidates:
        return f" Nearest: {_dotted(candidates[0])}"
    return f" Keys here: {', '.join(key[-1] for key in siblings) or 'none'}"


def _keys(schema: type[BaseModel], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, info in schema.model_fields.items():
        yield (*prefix, name)
        for inner in models_in(info.annotation):
            yield from _keys(inner, (*prefix, name))


def models_in(annotation: Any) -> list[type[BaseModel]]:
    if get_origin(annotation) in (Union, types.UnionType):
        return [model for member in get_args(annotation) for model in models_in(member)]
    return [annotation] if isinstance(annotation, type) and issubclass(annotation, BaseModel) else []


def _real_keys(loc: tuple[int | str, ...], values: Any) -> KeyPath:
    """Pydantic adds the names of union members to a path; keep what stands in the file."""
    path: list[int | str] = []
    for index, part in enumerate(loc):
        last = index == len(loc) - 1 and not _is_union_tag(part)
        # The first part is a key even where the file has none of it: a block left out may have a key that is needed.
        if isinstance(values, dict) and (part in values or last or index == 0):
            path.append(part)
            values = values.get(part, {})
        elif isinstance(values, list) and isinstance(part, int):
            path.append(part)
            values = values[part]
    return tuple(path)


def _is_union_tag(part: int | str) -> bool:
    # constrained-int: of an Annotated one.
    return isinstance(part, str) and (
        "[" in part or part.removeprefix("constrained-") in ("str", "int", "float", "bool")
    )


def _dotted(path: tuple[int | str, ...]) -> str:
    return ".".join(str(part) for part in path)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
