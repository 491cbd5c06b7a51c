"""The keys of a config as a page to read: made from the schema, so that it cannot disagree with it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from shardwise.config.explain import models_in
from shardwise.config.load import built_in_blocks, strategy_blocks
from shardwise.config.registry import BUILT_IN
from shardwise.config.schema import Config


def reference(schema: type[BaseModel]) -> str:
    """Markdown: one table per block."""
    lines: list[str] = []
    _describe(schema, "", lines)
    return "\n".join(lines).rstrip() + "\n"


def reference_of_all() -> str:
    """What every task has, then the blocks of strategies that have their own, then those of each task."""
    lines: list[str] = []
    _describe(Config, "", lines)
    for name, block in strategy_blocks().items():
        _describe(block, f"training.{name}", lines)
    for task in BUILT_IN["shardwise.tasks"]:
        lines += [f"# task: {task}", ""]
        for key, block in built_in_blocks(task).items():
            if block.model_fields:
                _describe(block, key, lines)
    return "\n".join(lines).rstrip() + "\n"


def _describe(schema: type[BaseModel], prefix: str, lines: list[str]) -> None:
    lines += [
        f"## `{prefix}`" if prefix else "## top level",
        "",
        "| key | default | allowed | what it does |",
        "|---|---|---|---|",
    ]
    inner: list[tuple[str, type[BaseModel]]] = []
    for name, field in schema.model_fields.items():
        path = f"{prefix}.{name}" if prefix else name
        blocks = models_in(field.annotation)
        inner += [(path, block) for block in blocks]
        allowed = "a block, see below" if blocks else _allowed(field)
        lines.append(f"| `{name}` | {_default(field, bool(blocks))} | {allowed} | {field.description or ''} |")
    lines.append("")
    for path, block in inner:
        if block.model_fields:
            _describe(block, path, lines)


def _default(field: FieldInfo, is_block: bool) -> str:
    if field.is_required():
        return "required"
    value = field.default
    if is_block or value in (None, PydanticUndefined):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _allowed(field: FieldInfo) -> str:
    schema = _json_schema(field)
    options = [option for part in schema.get("anyOf", [schema]) for option in _options(part)]
    return ", ".join(dict.fromkeys(options))


def _options(part: dict[str, Any]) -> list[str]:
    if listed := part.get("enum", part.get("examples")):
        return [str(value) for value in listed]
    if "const" in part:
        return [str(part["const"]).lower()]
    if part.get("type") == "null":
        return []
    if part.get("type") == "array":
        return ["list of " + " / ".join(_options(part.get("items", {})))]
    names = {
        "integer": "whole number",
        "number": "number",
        "string": "text",
        "boolean": "true, false",
        "object": "keys",
    }
    bounds = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    limits = " and ".join(f"{sign} {part[key]:g}" for key, sign in bounds.items() if key in part and part[key] < 2**30)
    return [f"{names.get(part.get('type', ''), '')} {limits}".strip()]


def _json_schema(field: FieldInfo) -> dict[str, Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(field.rebuild_annotation()).json_schema()
