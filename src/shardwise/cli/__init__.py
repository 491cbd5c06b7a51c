"""The command line: one file per verb. Nothing heavy is imported before the verb is known."""

from __future__ import annotations

import argparse
import difflib
import importlib
import io
import sys
from collections.abc import Sequence

import shardwise
from shardwise.errors import ShardwiseError

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
    try:
        parsed = _parser(arguments).parse_args(arguments)
        return int(importlib.import_module(f"shardwise.cli.{parsed.verb}").run(parsed))
    except ShardwiseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has left, as in `| head`
        sys.stderr.close()
        return 141


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="shardwise",
        description="Train PyTorch models on one device, many devices or many machines from one YAML file.",
        epilog="The first thing to try:  shardwise train configs/chess-tiny.yaml",
    )
    parser.add_argument("--version", action="version", version=f"shardwise {shardwise.__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, text in VERBS.items():
        verb = verbs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if arguments and arguments[0] == name:
            importlib.import_module(f"shardwise.cli.{name}").add_arguments(verb)
    if arguments and not arguments[0].startswith("-") and arguments[0] not in VERBS:
        near = difflib.get_close_matches(arguments[0], VERBS, n=1)
        hint = f". Nearest: {near[0]}" if near else ""
        parser.error(f"{arguments[0]!r} is not a verb of shardwise: {', '.join(VERBS)}{hint}")
    return parser
