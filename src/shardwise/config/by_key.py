"""Nested values, each by its whole key, as `--set` writes it."""

from __future__ import annotations

from typing import Any


def by_dotted_key(value: Any, prefix: str = "") -> dict[str, Any]:
    """`{"training": {"lr": 1}}` as `{"training.lr": 1}`."""
    if not isinstance(value, dict):
        return {prefix: value}
    parts = (by_dotted_key(inner, f"{prefix}.{name}".strip(".")) for name, inner in value.items())
    return {key: leaf for part in parts for key, leaf in part.items()}
