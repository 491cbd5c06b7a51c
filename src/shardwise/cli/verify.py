"""`shardwise verify CONFIG`."""

from __future__ import annotations

import argparse
import logging

from shardwise.cli.arguments import add_config_arguments, path_text
from shardwise.cli.output import show

log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser, "the YAML file, or a program with a loop of its own (train.py)")
    parser.add_argument("--ranks", type=int, metavar="N", help="ranks to verify (default: training.num_gpus, or 2)")
    parser.add_argument("--strategy", metavar="NAME", help="verify this strategy instead of the config's")
    parser.add_argument("--steps", type=int, default=7, metavar="K", help="optimizer steps of every run (7)")
    parser.add_argument(
        "--against", type=path_text, metavar="OTHER", help="compare with this config instead of with one process"
    )
    parser.add_argument(
        "--quick", action="store_true", help="compare numbers and samples alone; the report lists what it leaves out"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")


def run(args: argparse.Namespace) -> int:
    """0: all is proved. 1: something failed. 3: nothing failed, something is not proved. 2: it could not be tried (an error, told
    by the caller)."""
    from shardwise.errors import ConfigError, ShardwiseError
    from shardwise.verify.proof import verify

    if args.ranks is not None and args.ranks < 1:
        raise ConfigError(f"--ranks {args.ranks}: must be at least 1")

    try:
        report = verify(
            args.config,
            ranks=args.ranks,
            strategy=args.strategy,
            steps=args.steps,
            against=args.against,
            overrides=args.set,
            say=log.info,
            quick=args.quick,
        )
    except ShardwiseError:
        raise
    except Exception:  # a mistake of our own: exit code 1 would say that the training is wrong
        log.exception("verify itself failed: this says nothing about the training. Please report it")
        return 2
    show(report.as_json() if args.json else report.as_text())
    return report.exit_code
