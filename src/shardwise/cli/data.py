"""`shardwise data shard CONFIG --to FOLDER` and `shardwise data verify FOLDER`."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from shardwise.cli.arguments import add_config_arguments, path_text
from shardwise.cli.output import show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    shard = actions.add_parser("shard", help="write a shuffled, sharded copy of a config's cells, for full speed")
    add_config_arguments(shard, "the YAML file, of task cells")
    shard.add_argument("--to", required=True, type=path_text, metavar="FOLDER", help="a new folder for the copy")
    shard.add_argument(
        "--cells-per-shard", type=int, default=65_536, metavar="N", help="cells in a file, and in memory (65536)"
    )
    verify = actions.add_parser("verify", help="compare every file of a sharded copy with its checksum")
    verify.add_argument("folder", type=path_text, help="the sharded copy")


def run(args: argparse.Namespace) -> int:
    return _shard(args) if args.action == "shard" else _verify(Path(args.folder))


def _shard(args: argparse.Namespace) -> int:
    from shardwise.config import load_config
    from shardwise.config.commands import command, overriding, yaml_text
    from shardwise.config.load import load_task_class
    from shardwise.errors import ConfigError

    config = load_config(args.config, args.set)
    if config.task != "cells":
        raise ConfigError(f"shardwise data shard copies cells, but {args.config} has task: {config.task}")
    if args.cells_per_shard < 1:
        raise ConfigError(f"--cells-per-shard {args.cells_per_shard}: must be at least 1")
    load_task_class("cells")  # says which package is missing
    from shardwise.tasks.cells.sharding import shard_cells
    from shardwise.tasks.cells.shards import open_shards

    began = time.perf_counter()
    folder = shard_cells(config.data, config.seed, Path(args.to), cells_per_shard=args.cells_per_shard)  # type: ignore[arg-type]
    copy = open_shards(folder)
    size = sum(file.stat().st_size for file in folder.iterdir()) / 2**20
    seconds = time.perf_counter() - began
    cells = len(copy.training) + len(copy.validation)
    from_copy = ["data.source=shards", f"data.paths=[{yaml_text(str(folder))}]"]
    show(
        f"{folder}: {len(copy.training)} cells to train on in {len(copy.training.files)} shards, {len(copy.validation)} held "
        f"out, {size:.1f} MiB, in {seconds:.1f} s ({cells / seconds:.0f} cells/s)\n"
        f"train from it:  {command('train', args.config, *overriding(*args.set, *from_copy))}"
    )
    return 0


def _verify(folder: Path) -> int:
    from shardwise.data.manifest import problems_of, read_manifest
    from shardwise.errors import DataError
    from shardwise.tasks.cells.sources import check_format, compare

    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}")
    problems = problems_of(folder)
    if problems:
        raise DataError("\n  ".join([f"{folder} is damaged: make the copy anew", *problems]))
    manifest = read_manifest(folder)
    files = manifest["files"]
    if manifest["about"].get("kind") == "cells":
        check_format(folder, manifest["about"])
        changed = compare(manifest["about"]["sources"]).changed
        if changed:
            raise DataError(f"{folder} is whole, but was made from files that have changed since: {'; '.join(changed)}")
    show(
        f"{folder}: {len(files)} files, {sum(f['size'] for f in files.values()) / 2**20:.1f} MiB, every checksum matches"
    )
    return 0
