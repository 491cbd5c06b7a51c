"""What a config names on the Hugging Face hub, and where it lies once it has been fetched.

A field of a block is such a name if its schema says so: Field(…, json_schema_extra=hub_name("model")) or hub_name("dataset").
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from shardwise.config.commands import command
from shardwise.config.schema import Block, Config
from shardwise.errors import ConfigError

Kind = Literal["model", "dataset"]
AnyConfig = TypeVar("AnyConfig", bound=Config)
_REPOSITORY = re.compile(r"([A-Za-z0-9][\w.-]*/)?[A-Za-z0-9_][\w.-]*")


@dataclass(frozen=True)
class HubName:
    kind: Kind
    name: str
    key: str
    """Where the config says it, for messages: model.name."""

    def place_in(self, folder: str) -> Path:
        return Path(folder) / f"{self.kind}s" / self.name

    def is_in(self, folder: str) -> bool:
        """A folder without a file in it is nothing to train from."""
        return any(path.is_file() for path in self.place_in(folder).rglob("*"))


def hub_names(config: Config) -> list[HubName]:
    """Every name that is not a folder here. A ConfigError tells of one that can only be meant as a folder."""
    found = []
    for block in ("data", "tokenizer", "model"):
        for field, kind in _marked(getattr(config, block)):
            name = getattr(getattr(config, block), field)
            if name is None or Path(name).exists():
                continue
            if not looks_like_a_hub_name(name):
                raise ConfigError(
                    f"{block}.{field}: there is no folder {name} (looked for from {Path.cwd()}), and it is no name on the hub: "
                    "those look like owner/name"
                )
            found.append(HubName(kind, name, f"{block}.{field}"))
    return found


def looks_like_a_hub_name(name: str) -> bool:
    return _REPOSITORY.fullmatch(name) is not None


def use_fetched(config: AnyConfig) -> AnyConfig:
    """With `offline: true`, the same config with folders in place of names, and a hub library that stays off the net."""
    if not config.offline:
        return config
    os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
    for hub in hub_names(config):
        place = hub.place_in(config.fetch_dir)
        if not hub.is_in(config.fetch_dir):
            raise ConfigError(
                f"offline: true, but {hub.key}: {hub.name} is not in {config.fetch_dir} ({place} is "
                f"{'empty' if place.is_dir() else 'missing'}), and there is no folder of that name. Where there is internet, "
                f"run:  {command('fetch', *(config.source.words if config.source else ['CONFIG']))}"
            )
        block, field = hub.key.split(".")
        changed = getattr(config, block).model_copy(update={field: str(place)})
        config = config.model_copy(update={block: changed})
    return config


def _marked(block: Block) -> list[tuple[str, Kind]]:
    marked = []
    for name, field in type(block).model_fields.items():
        extra: Any = field.json_schema_extra
        if isinstance(extra, dict) and "hub" in extra:
            marked.append((name, extra["hub"]))
    return marked
