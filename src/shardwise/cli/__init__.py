"""The command line: one file per verb. Nothing heavy is imported before the verb is known."""

from __future__ import annotations

import argparse
import importlib
import io
import logging
import sys
from collections.abc import Sequence

import shardwise
from shardwise.cli.sign_of_life import telling_of_imports
from shardwise.compat.quiet import quiet_pytorch
from shardwise.errors import ShardwiseError
from shardwise.watch.console import LEVELS, LOG_LEVEL, PLAIN, follow_log_level, program_logging, set_log_level

log = logging.getLogger(__name__)

VERBS = {
    "train": "run it: one process, all local devices, or a rank of a bigger job",
    "verify": "prove that N ranks compute what one would",
    "drill": "train with faults at random moments, and prove that nothing is lost",
    "config": "check a config, show it resolved, print its schema",
    "data": "write a sharded copy of cells for full speed, and check one",
    "bench": "measure: whether the data keeps up",
    "checkpoint": "list, check and repair the checkpoints of a run",
    "fetch": "download model and data ahead, for machines without internet",
    "export": "write trained weights as safetensors, in Hugging Face layout where the model has one",
}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without × shows ? instead of a traceback
    with program_logging():
        try:
            parsed = _parser(arguments).parse_args(arguments)
            if parsed.log_level is not None:
                set_log_level(parsed.log_level)
            follow_log_level()
            quiet_pytorch()
            with telling_of_imports(quiet=getattr(parsed, "json", False)):
                return int(importlib.import_module(f"shardwise.cli.{parsed.verb}").run(parsed))
        except ShardwiseError as error:
            log.error(error)
            return 2
        except KeyboardInterrupt:
            log.warning("interrupted", extra=PLAIN)
            return 130
        except BrokenPipeError:  # the reader of our output has left, as in `| head`
            sys.stderr.close()
            return 141


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="shardwise",
        description="Train PyTorch models on one device, many devices or many machines from one YAML file.",
        epilog="The first thing to try:  shardwise train configs/chess-tiny.yaml. Every verb takes --quiet and --log-level.",
    )
    parser.add_argument("--version", action="version", version=f"shardwise {shardwise.__version__}")
    parser.set_defaults(log_level=None)
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, text in VERBS.items():
        verb = verbs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if arguments and arguments[0] == name:
            importlib.import_module(f"shardwise.cli.{name}").add_arguments(verb)
            _add_log_arguments(verb)
    if arguments and not arguments[0].startswith("-") and arguments[0] not in VERBS:
        from shardwise.config.registry import nearest  # not for --help, which must be there at once

        near = nearest(arguments[0], VERBS)
        hint = f". Nearest: {near}" if near else ""
        parser.error(f"{arguments[0]!r} is not a verb of shardwise: {', '.join(VERBS)}{hint}")
    return parser


def _add_log_arguments(parser: argparse.ArgumentParser) -> None:
    """Every verb has them, and every action of a verb. Not given, they leave no value: an action would undo its verb's."""
    choice = parser.add_argument_group("output").add_mutually_exclusive_group()
    choice.add_argument(
        "--log-level",
        choices=LEVELS,
        default=argparse.SUPPRESS,
        help=f"how much is told; default: info, or what {LOG_LEVEL} says",
    )
    choice.add_argument(
        "--quiet",
        dest="log_level",
        action="store_const",
        const="warning",
        default=argparse.SUPPRESS,
        help="only warnings and errors; the result of a verb is printed all the same",
    )
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                _add_log_arguments(below)
