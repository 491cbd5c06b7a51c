"""`shardwise fetch CONFIG`."""

from __future__ import annotations

import argparse
import logging
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.cli.arguments import add_config_arguments, path_text
from shardwise.cli.output import show

if TYPE_CHECKING:
    from shardwise.config.hub import HubName

log = logging.getLogger(__name__)

ANSWER_WITHIN_SECONDS = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    parser.add_argument(
        "--to", type=path_text, metavar="FOLDER", help="where to put it; default: the config's fetch_dir"
    )
    parser.add_argument("--again", action="store_true", help="download again what is there already")


def run(args: argparse.Namespace) -> int:
    from shardwise.config import load_config
    from shardwise.config.commands import command, overriding, yaml_text
    from shardwise.config.hub import hub_names

    config = load_config(args.config, args.set)
    folder = args.to or config.fetch_dir
    names = hub_names(config)
    if not names:
        show(f"{args.config} names no model and no data set of the hub: there is nothing to fetch")
        return 0
    for hub in names:
        place = hub.place_in(folder)
        if hub.is_in(folder) and not args.again:
            show(f"{hub.key}: {hub.name} is in {place} already")
            continue
        show(f"{hub.key}: {hub.name} …")
        _download(hub, place)
        size = sum(file.stat().st_size for file in place.rglob("*") if file.is_file())
        show(f"  {place}: {size / 2**20:.1f} MiB")
    changes = ["offline=true", *([] if folder == config.fetch_dir else [f"fetch_dir={yaml_text(folder)}"])]
    show(f"train without internet:  {command('train', args.config, *overriding(*args.set, *changes))}")
    return 0


def _download(hub: HubName, place: Path) -> None:
    """Aside first: what is in place is whole."""
    from shardwise.errors import DataError, MissingExtra

    try:
        from huggingface_hub import HfApi, snapshot_download
        from huggingface_hub.utils import disable_progress_bars
    except ImportError:
        raise MissingExtra.of("huggingface_hub", "lm", "shardwise fetch") from None
    if not log.isEnabledFor(logging.INFO):
        disable_progress_bars()
    aside = place.with_name(f".{place.name}.fetching")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        # The one call that the library does not repeat: without internet it fails at once, and not after half a minute.
        about = HfApi().repo_info(hub.name, repo_type=hub.kind, timeout=ANSWER_WITHIN_SECONDS)
        unwanted = _unwanted([file.rfilename for file in about.siblings or []]) if hub.kind == "model" else []
        snapshot_download(hub.name, repo_type=hub.kind, revision=about.sha, local_dir=aside, ignore_patterns=unwanted)
        shutil.rmtree(aside / ".cache", ignore_errors=True)  # the library's own notes on the download
        shutil.rmtree(place, ignore_errors=True)
        aside.rename(place)
    except Exception as error:  # the hub library passes on those of the network libraries below it
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DataError(
            f"{hub.key}: {hub.name} could not be fetched from the hub: {reason}\n  Is the name right, is there internet, and, "
            "for a gated one, are you logged in (hf auth login)?"
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _unwanted(files: list[str]) -> list[str]:
    """Weights for other frameworks, and the same weights again as pickles where there are safetensors."""
    others = ["*.msgpack", "*.h5", "*.ot", "*.onnx", "*.gguf", "*.tflite"]
    return others + (["*.bin", "*.pt", "*.pth"] if any(file.endswith(".safetensors") for file in files) else [])
