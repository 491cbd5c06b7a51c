"""`shardwise export RUN --to FOLDER`.

A run folder may come from anywhere, so nothing in it is taken for code: a task of the user's own is imported only as a config
says that the user names.
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.cli.arguments import path_text
from shardwise.cli.output import show

if TYPE_CHECKING:
    from shardwise.config import Config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=path_text, help="the run folder")
    parser.add_argument("--to", required=True, type=path_text, metavar="FOLDER", help="a new folder for the weights")
    parser.add_argument(
        "--checkpoint",
        default="best",
        type=path_text,
        metavar="WHICH",
        help="best (default), last, or the path of a checkpoint",
    )
    parser.add_argument(
        "--config", type=path_text, metavar="FILE", help="the YAML file of the run, needed for a task of your own"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a key of the config, as for the training",
    )


def run(args: argparse.Namespace) -> int:
    from shardwise.checkpoint import CheckpointStore
    from shardwise.checkpoint.export import export_one
    from shardwise.config.load import make_task
    from shardwise.errors import ShardwiseError

    folder, target = Path(args.run), Path(args.to)
    if not (folder / "config.yaml").is_file():
        raise ShardwiseError(f"{folder} is not the folder of a run: it has no config.yaml")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ShardwiseError(f"--to {target} is there already and not empty: name a new folder")
    config = _config(folder, target, args.config, args.set)
    # A run folder may have been moved: its checkpoints are looked for where it is now.
    inside = folder / "checkpoints"
    store = CheckpointStore(inside if inside.is_dir() else Path(config.checkpoint_folder))
    aside = target.with_name(f".{target.name}.writing")

    def choose() -> tuple[Path, list[str]]:
        if args.checkpoint == "best":
            return store.best_whole(config.training.monitor_mode)
        return store.named(store.folder if args.checkpoint == "last" else Path(args.checkpoint), act=False)

    try:
        checkpoint = export_one(make_task(config), choose, aside)
        for file in aside.iterdir():  # safetensors makes files that only their owner may read
            file.chmod(0o666 & ~_umask())
        if target.exists():
            target.rmdir()
        aside.rename(target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    show(f"exported {checkpoint} to {target}:")
    for file in sorted(target.iterdir()):
        show(f"  {file.name:<28} {file.stat().st_size / 2**20:8.2f} MiB")
    return 0


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def _config(folder: Path, target: Path, trusted: str | None, overrides: Sequence[str]) -> Config:
    """The run's config; where its task is code of the user's own, the one that the user names."""
    from shardwise.config import load_config
    from shardwise.config.commands import command
    from shardwise.config.yaml_lines import read_file, read_yaml
    from shardwise.errors import ConfigError, ShardwiseError

    try:
        task = read_yaml(read_file(folder / "config.yaml"), "it").values["task"]
    except (ConfigError, KeyError, TypeError) as error:
        raise ShardwiseError(f"{folder / 'config.yaml'} is not the config of a run: {error}") from None
    if trusted is not None:
        config = load_config(trusted, overrides)
        if config.task != task:
            raise ShardwiseError(f"--config {trusted} has task: {config.task}, but the run trained {task}")
        return config
    if ":" in str(task):
        raise ShardwiseError(
            f"this run's task is {task}, code of its own, which is not run on the word of a run folder. Name the config that "
            f"it was trained with:  {command('export', folder, '--to', target, '--config', 'YOUR.yaml')}"
        )
    return load_config(folder / "config.yaml", overrides)
