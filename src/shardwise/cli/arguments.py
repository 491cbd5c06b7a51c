"""The config of a verb: `train FILE` and `train --config FILE` are the same, and --set changes keys of it."""

from __future__ import annotations

import argparse
import os
from typing import Any


def path_text(text: str) -> str:
    """A type of arguments. A shell does not replace the ~ of `--to=~/model`, nor a quoted one."""
    return os.path.expanduser(text)  # noqa: PTH111  not Path.expanduser, which drops ./ at the beginning


def add_config_arguments(parser: argparse.ArgumentParser, text: str = "the YAML file") -> None:
    class TheConfig(argparse.Action):
        def __call__(
            self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: Any = None
        ) -> None:
            if (before := getattr(namespace, "config", None)) is not None:
                parser.error(f"one config at a time, but there are two: {before} and {values}")
            namespace.config = values
            by_place.required = False

    # Not `nargs="?"`: options before it would be taken for its absence (Python 3.11).
    by_place = parser.add_argument("config", action=TheConfig, type=path_text, help=text)
    parser.add_argument(
        "--config",
        dest="config",
        action=TheConfig,
        type=path_text,
        metavar="FILE",
        help="the same, as an option",
        default=argparse.SUPPRESS,
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a key, e.g. training.batch_size=8"
    )
