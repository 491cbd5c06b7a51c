"""`shardwise export RUN --to FOLDER`."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="the run folder")
    parser.add_argument("--to", required=True, metavar="FOLDER", help="a new folder for the weights")
    parser.add_argument(
        "--checkpoint", default="best", metavar="WHICH", help="best (default), last, or the path of a checkpoint"
    )


def run(args: argparse.Namespace) -> int:
    from shardwise.checkpoint import CheckpointStore
    from shardwise.checkpoint.export import export_checkpoint
    from shardwise.config import load_config
    from shardwise.config.load import make_task
    from shardwise.errors import ShardwiseError

    folder, target = Path(args.run), Path(args.to)
    if not (folder / "config.yaml").is_file():
        raise ShardwiseError(f"{folder} is not the folder of a run: it has no config.yaml")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ShardwiseError(f"--to {target} is there already and not empty: name a new folder")
    sys.path += _import_from(folder)
    config = load_config(folder / "config.yaml")
    # A run folder may have been moved: its checkpoints are looked for where it is now.
    inside = folder / "checkpoints"
    store = CheckpointStore(inside if inside.is_dir() else Path(config.checkpoint_folder))
    best = store.best(config.training.monitor_mode) if args.checkpoint == "best" else None
    wanted = args.checkpoint if args.checkpoint not in ("best", "last") else (best.path if best else store.folder)
    checkpoint, complaints = store.named(Path(wanted))
    for complaint in complaints:
        print(f"warning: {complaint}", file=sys.stderr)
    aside = target.with_name(f".{target.name}.writing")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        export_checkpoint(make_task(config), checkpoint, aside)
        for file in aside.iterdir():  # safetensors makes files that only their owner may read
            file.chmod(0o666 & ~_umask())
        if target.exists():
            target.rmdir()
        aside.rename(target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    print(f"exported {checkpoint} to {target}:")
    for file in sorted(target.iterdir()):
        print(f"  {file.name:<28} {file.stat().st_size / 2**20:8.2f} MiB")
    return 0


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def _import_from(folder: Path) -> list[str]:
    """Where a task of the user's own lay when it was trained."""
    try:
        return list(json.loads((folder / "run.json").read_text())["import_from"])
    except (OSError, ValueError, KeyError, TypeError):
        return []
